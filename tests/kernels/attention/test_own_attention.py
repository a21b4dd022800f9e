"""What holds for every kernel of ours for attention; their shapes are in files of their own."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from kernels.support import attended, close_rows, half_dtype, heads, randn
from sfast_ext.kernels.attention import attention, flash_attention, short_attention
from sfast_ext.kernels.backend import nvrtc


class Kernel(NamedTuple):
    module: ModuleType
    accepts: Callable[..., str | None]
    keys: int
    size: int
    shapes: list[tuple[int, ...]]  # batch, heads, queries, keys, head dimension
    refused: list[tuple[int, ...]]

    def operands(self, device, batch=2, count=2):
        return heads((batch, count, 70, self.keys, self.size), torch.float16, device)


SHORT = [(2, 3, 70, 77, 40), (1, 2, 130, 80, 64), (2, 1, 65, 154, 80), (1, 1, 33, 77, 160), (2, 2, 1, 1, 8)]
SHORT += [(1, 2, 129, 4, 24), (1, 1, 200, 16, 40), (1, 2, 64, 160, 100), (1, 1, 40, 129, 17), (1, 2, 100, 64, 128)]
LONG = [(2, 3, 70, 300), (1, 2, 256, 256), (1, 1, 33, 129), (2, 2, 1, 1), (1, 2, 65, 128), (3, 2, 300, 2000)]
LONG = [(*shape, size) for shape in LONG for size in (40, 64, 80)]
WIDE = [(1, 1, 70, 161, 40), (1, 1, 70, 81, 160), (1, 1, 70, 77, 168)]
OTHER = [(1, 1, 70, 200, 160), (1, 1, 70, 200, 48)]
KERNELS = {
    "short": Kernel(short_attention, short_attention.accepts, 77, 40, SHORT, WIDE),
    "flash 40": Kernel(flash_attention, flash_attention.accepts, 200, 40, LONG[::3], OTHER),
    "flash 64": Kernel(flash_attention, flash_attention.accepts, 200, 64, LONG[1::3], OTHER),
    "flash 80": Kernel(flash_attention, flash_attention.accepts, 200, 80, LONG[2::3], OTHER),
}


def on(device: torch.device, name: str) -> Kernel:
    if device.type == "cpu" and KERNELS[name].module is flash_attention:
        pytest.skip("no kernel of Triton's: runs on a GPU only")
    return KERNELS[name]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, device: torch.device) -> Kernel:
    return on(device, request.param)


@half_dtype
@pytest.mark.parametrize(("name", "shape"), [(n, s) for n, k in KERNELS.items() for s in k.shapes], ids=str)
def test_shapes(device, dtype, name, shape):
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("of bfloat16 the interpreter multiplies the bits")
    kernel = on(device, name)
    q, k, v = heads(shape, dtype, device)
    assert kernel.accepts(q, k, v, None) is None
    for scale in (None, 0.5):
        y = kernel.module.launch(q, k, v, scale)
        assert y.shape == q.shape and y.dtype == dtype
        assert y.transpose(1, 2).is_contiguous()  # heads side by side, for the product that follows
        close_rows(y, attended(q, k, v, scale))


def test_large_scores(kernel, device):
    q, k, v = kernel.operands(device)
    close_rows(kernel.module.launch(60 * q, k, v, None), attended(60 * q, k, v), scale=4)


def test_strides(kernel, device):
    q, k, v = kernel.operands(device, count=3)
    for some in (q.contiguous(), q[:, :, ::2], q.transpose(1, 2).contiguous().transpose(1, 2)[:, 1:]):
        keys = [x[:, : some.shape[1]] for x in (k.contiguous(), v)]
        close_rows(kernel.module.launch(some, *keys, None), attended(some, *keys))
    assert kernel.module.launch(q.contiguous(), k, v, None).is_contiguous()


def test_nan_stays_in_its_row(kernel, device):
    q, k, v = kernel.operands(device, 1, 1)
    first = kernel.module.launch(q, k, v, None)
    q[0, 0, 3, 5] = float("nan")
    y = kernel.module.launch(q, k, v, None)
    assert y[0, 0, 3].isnan().all()
    y[0, 0, 3] = first[0, 0, 3]
    assert torch.equal(y, first)


def test_what_they_do_not_take(kernel, device):
    q, k, v = kernel.operands(device)
    accepts = kernel.accepts
    assert accepts(q, k, v, None) is None
    assert accepts(q, k, v, 0.0)
    assert accepts(q, k, v, -1.0)
    assert accepts(q[0], k[0], v[0], None)
    assert accepts(q[:1], k, v, None)
    assert accepts(q, k, v[:, :, 1:], None)
    assert accepts(q.float(), k.float(), v.float(), None)
    assert accepts(q, k.to(torch.bfloat16), v, None)
    assert accepts(*(x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)), None)
    assert accepts(q[:, :, :0], k, v, None)
    for shape in kernel.refused:
        assert accepts(*heads(shape, torch.float16, device), None)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [40, 64, 80])
def test_flash_attention_needs_keys_at_16_bytes(size):
    q, k, v = heads((2, 2, 70, 200, size), torch.float16, torch.device("cuda"))
    for offset, good in ((8, True), (4, False), (1, False)):
        odd = randn(2, 70, 2, size + 8, dtype=torch.float16, device=q.device)[..., offset : offset + size]
        assert (flash_attention.accepts(q, *[odd.transpose(1, 2)] * 2, None) is None) == good
    for offset, good in ((2, True), (1, False)):
        odd = randn(2, 70, 2, size + 8, dtype=torch.float16, device=q.device)[..., offset : offset + size]
        assert (flash_attention.accepts(odd.transpose(1, 2), k, v, None) is None) == good


@pytest.mark.gpu
def test_flash_attention_of_a_growing_maximum(monkeypatch):
    """Each block's scores rise by far more than the sums' slack, or are all far below zero."""
    for size, shape in ((size, shape) for size, shapes in flash_attention.SHAPES.items() for shape in shapes):
        monkeypatch.setattr(flash_attention, "best", lambda q, k, shape=shape: shape)
        q, k, v = heads((1, 2, 300, 700, size), torch.float16, torch.device("cuda"))
        rising = k * torch.linspace(0, 8, 700, device=k.device).to(k.dtype)[:, None]
        for query, keys in ((q, rising), (q, -rising), (q.abs(), -4 * k.abs()), (4 * q, rising.flip(2))):
            close_rows(flash_attention.launch(query, keys, v, None), attended(query, keys, v), scale=4)


def test_short_attention_of_several_blocks_of_rows_a_program(device, monkeypatch):
    monkeypatch.setattr(short_attention, "multiprocessors", lambda device: 1)
    q, k, v = heads((1, 2, 600, 77, 40), torch.float16, device)  # 20 blocks for 3 programs
    close_rows(short_attention.launch(q, k, v, None), attended(q, k, v))


def declined(*args, **kwargs):
    raise AssertionError("declined")


def test_the_launcher_of_attention_takes_them(kernel, device, monkeypatch):
    monkeypatch.setattr(attention.launch, "fallback", declined)
    monkeypatch.setattr(flash_attention, "profitable", lambda *args: True)
    q, k, v = kernel.operands(device)
    close_rows(attention.launch(q, k, v, scale=0.3), attended(q, k, v, 0.3))
    mask = torch.zeros(70, kernel.keys, dtype=torch.float16, device=device)
    for options in ({"is_causal": True}, {"mask": mask}):
        with pytest.raises(AssertionError, match="declined"):
            attention.launch(q, k, v, **options)


UNETS = [(8, 4096, 77, 40), (8, 1024, 77, 80), (8, 256, 77, 160), (20, 1024, 77, 64), (10, 3952, 154, 64)]
UNETS = [("short", (images, *rest)) for images in (2, 8, 16) for rest in [*UNETS, (8, 7345, 16, 40)]]
LONG_UNETS = [(2, 8, 4096, 4096, 40), (2, 8, 7345, 7345, 40), (2, 20, 988, 988, 64), (2, 10, 4096, 4096, 64)]
LONG_UNETS += [(16, 8, 4096, 4096, 40), (1, 20, 1024, 1024, 64), (7, 5, 333, 1999, 64), (16, 20, 1024, 1024, 64)]
LONG_UNETS += [(2, 8, 1024, 1024, 80), (2, 8, 4096, 4096, 80), (1, 8, 1653, 1653, 80), (16, 8, 1024, 1024, 80)]
UNETS += [(f"flash {shape[-1]}", shape) for shape in LONG_UNETS]


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(("name", "shape"), UNETS, ids=str)
def test_unet_shapes(dtype, name, shape):
    q, k, v = heads(shape, dtype, torch.device("cuda"))
    assert KERNELS[name].accepts(q, k, v, None) is None
    y = KERNELS[name].module.launch(q, k, v, None)
    for images in range(0, len(q), 2):  # float64 scores of all at once would be too much
        some = [x[images : images + 2] for x in (y, q, k, v)]
        close_rows(some[0], attended(*some[1:]))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [40, 64, 80])
def test_flash_attention_in_each_shape(size, monkeypatch):
    q, k, v = heads((2, 3, 500, 700, size), torch.float16, torch.device("cuda"))
    wanted = attended(q, k, v)
    for shape in flash_attention.SHAPES[size]:
        monkeypatch.setattr(flash_attention, "best", lambda q, k, shape=shape: shape)
        close_rows(flash_attention.launch(q, k, v, None), wanted)


EVEN = [(size, shape) for size, shapes in flash_attention.SHAPES.items() for shape in shapes if shape.even]
# images, heads, queries, keys: rows that make no stack of four, few blocks of keys, more of them than slots
EVEN_SIZES = [(1, 3, 200, 333), (2, 5, 1000, 700), (3, 7, 63, 256), (2, 1, 2049, 449), (1, 4, 1500, 1025)]


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize("sizes", EVEN_SIZES, ids=str)
@pytest.mark.parametrize(("size", "shape"), EVEN, ids=str)
def test_even_blocks_take_many_places_each(size, shape, sizes, dtype, monkeypatch):
    monkeypatch.setattr(flash_attention, "best", lambda q, k: shape)
    q, k, v = heads((*sizes, size), dtype, torch.device("cuda"))
    wanted = attended(q, k, v)
    for at_once in (1, 2, 7, 19, 132):
        monkeypatch.setattr(flash_attention, "multiprocessors", lambda device, count=at_once: count)
        for _ in range(3):
            close_rows(flash_attention.launch(q, k, v, None), wanted)


@pytest.mark.parametrize("at_once", [1, 7, 132])
@pytest.mark.parametrize(("size", "shape"), EVEN, ids=str)
def test_even_blocks_have_as_much_to_do(size, shape, at_once, monkeypatch):
    monkeypatch.setattr(flash_attention, "multiprocessors", lambda device: at_once)
    for images, count, queries in [(1, 1, 1), (2, 20, 1024), (2, 20, 988), (2, 10, 4096), (8, 20, 1024), (3, 7, 63)]:
        divided = flash_attention.division(torch.empty(images, count, queries, size, device="meta"), shape)
        units = images * count * -(-queries // 64)
        assert shape.groups * divided.stacks + divided.shares == units
        assert divided.shares >= shape.groups * divided.parted >= 0 and divided.stacks >= 0
        assert divided.blocks == min(at_once, divided.stacks + divided.shares)
        assert units / shape.groups / at_once <= divided.waves < units / shape.groups / at_once + 1


@pytest.mark.parametrize(
    ("queries", "size", "groups"),
    [
        (1024, 80, 2),
        (1536, 80, 3),
        (4096, 80, 3),
        (1653, 80, 2),
        (4096, 40, 4),
        (512, 64, 1),
        (1024, 64, 2),
        (4096, 64, 2),
    ],
)
def test_the_shape_whose_rounds_take_least(queries, size, groups, monkeypatch):
    monkeypatch.setattr(flash_attention, "multiprocessors", lambda device: 132)
    q = torch.empty(2, 8, queries, size, device="meta")
    assert flash_attention.best(q, q).groups == groups
    if size == 64 and queries > 512:
        assert flash_attention.best(q, q[:, :, :700]).groups == (1 if queries == 1024 else 4)  # few keys
        many = torch.empty(5, 8, queries, size, device="meta")
        assert flash_attention.best(many, many).groups == (4 if queries == 1024 else 2)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 8, 1024, 1024, 40), (2, 8, 4096, 200, 64), (2, 8, 4096, 200, 40)])
def test_too_few_blocks_or_keys_are_left_to_the_library(shape):
    q, k, v = heads(shape, torch.float16, torch.device("cuda"))
    assert flash_attention.accepts(q, k, v, None) is None
    assert not flash_attention.profitable(q, k)


def test_attention_without_the_kernel_is_the_librarys(monkeypatch):
    def unavailable(*args):
        raise nvrtc.Unavailable("no compiler")

    q, k, v = heads((1, 2, 70, 300, 64), torch.float32, torch.device("cpu"))
    monkeypatch.setattr(flash_attention, "accepts", lambda *args: None)
    monkeypatch.setattr(flash_attention, "profitable", lambda *args: True)
    monkeypatch.setattr(flash_attention, "launch", unavailable)
    assert torch.equal(attention.launch(q, k, v), attention.reference(q, k, v))
