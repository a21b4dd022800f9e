"""What holds for every kernel of ours for attention; their shapes are in files of their own."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from sfast_ext.kernels import attention, flash_attention, short_attention

from .support import attended, close_rows, half_dtype, heads, randn


class Kernel(NamedTuple):
    module: ModuleType
    keys: int
    size: int
    shapes: list[tuple[int, ...]]  # batch, heads, queries, keys, head dimension
    refused: list[tuple[int, ...]]

    def operands(self, device, batch=2, count=2):
        return heads((batch, count, 70, self.keys, self.size), torch.float16, device)


SHORT = [(2, 3, 70, 77, 40), (1, 2, 130, 80, 64), (2, 1, 65, 154, 80), (1, 1, 33, 77, 160), (2, 2, 1, 1, 8)]
SHORT += [(1, 2, 129, 4, 24), (1, 1, 200, 16, 40), (1, 2, 64, 160, 100), (1, 1, 40, 129, 17), (1, 2, 100, 64, 128)]
LONG = [(2, 3, 70, 300, 64), (1, 2, 256, 256, 64), (1, 1, 33, 129, 64), (2, 2, 1, 1, 64), (1, 2, 65, 128, 64)]
KERNELS = {
    "short": Kernel(short_attention, 77, 40, SHORT, [(1, 1, 70, 161, 40), (1, 1, 70, 81, 160), (1, 1, 70, 77, 168)]),
    "flash": Kernel(flash_attention, 200, 64, LONG, [(1, 1, 70, 200, 80), (1, 1, 70, 200, 40)]),
}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return KERNELS[request.param]


@half_dtype
@pytest.mark.parametrize(("name", "shape"), [(n, s) for n, k in KERNELS.items() for s in k.shapes], ids=str)
def test_shapes(device, dtype, name, shape):
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("of bfloat16 the interpreter multiplies the bits")
    module = KERNELS[name].module
    q, k, v = heads(shape, dtype, device)
    assert module.takes(q, k, v, None)
    for scale in (None, 0.5):
        y = module.launch(q, k, v, scale)
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
    takes = kernel.module.takes
    assert takes(q, k, v, None)
    assert not takes(q, k, v, 0.0)
    assert not takes(q, k, v, -1.0)
    assert not takes(q[0], k[0], v[0], None)
    assert not takes(q[:1], k, v, None)
    assert not takes(q, k, v[:, :, 1:], None)
    assert not takes(q.float(), k.float(), v.float(), None)
    assert not takes(q, k.to(torch.bfloat16), v, None)
    assert not takes(*(x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)), None)
    assert not takes(q[:, :, :0], k, v, None)
    for shape in kernel.refused:
        assert not takes(*heads(shape, torch.float16, device), None)


def test_flash_attention_needs_keys_at_16_bytes(device):
    q, k, v = KERNELS["flash"].operands(device)
    odd = randn(2, 70, 2, 72, dtype=torch.float16, device=device)[..., 4:68].transpose(1, 2)
    assert flash_attention.takes(odd, k, v, None)
    assert not flash_attention.takes(q, odd, odd, None)


def test_short_attention_of_several_blocks_of_rows_a_program(device, monkeypatch):
    monkeypatch.setattr(short_attention, "multiprocessors", lambda device: 1)
    q, k, v = heads((1, 2, 600, 77, 40), torch.float16, device)  # 20 blocks for 3 programs
    close_rows(short_attention.launch(q, k, v, None), attended(q, k, v))


def test_the_launcher_of_attention_takes_them(kernel, device, monkeypatch):
    monkeypatch.setattr(attention, "library", None)
    q, k, v = kernel.operands(device)
    close_rows(attention.launch(q, k, v, scale=0.3), attended(q, k, v, 0.3))
    mask = torch.zeros(70, kernel.keys, dtype=torch.float16, device=device)
    for options in ({"is_causal": True}, {"mask": mask}):
        with pytest.raises(TypeError):
            attention.launch(q, k, v, **options)


UNETS = [(8, 4096, 77, 40), (8, 1024, 77, 80), (8, 256, 77, 160), (20, 1024, 77, 64), (10, 3952, 154, 64)]
UNETS = [("short", (images, *rest)) for images in (2, 8, 16) for rest in [*UNETS, (8, 7345, 16, 40)]]
UNETS += [("flash", (2, 20, 1024, 1024, 64)), ("flash", (2, 20, 988, 988, 64)), ("flash", (1, 10, 2304, 2304, 64))]
UNETS += [("flash", (7, 5, 333, 1999, 64))]


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(("name", "shape"), UNETS, ids=str)
def test_unet_shapes(dtype, name, shape):
    q, k, v = heads(shape, dtype, torch.device("cuda"))
    assert KERNELS[name].module.takes(q, k, v, None)
    close_rows(KERNELS[name].module.launch(q, k, v, None), attended(q, k, v))


@pytest.mark.gpu
def test_many_programs_are_left_to_the_library():
    assert not flash_attention.takes(*heads((2, 10, 4096, 4096, 64), torch.float16, torch.device("cuda")), None)
