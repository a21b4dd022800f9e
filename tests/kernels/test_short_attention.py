from __future__ import annotations

import pytest
import torch

from sfast_ext.kernels import attention, short_attention

from .support import close_rows, half_dtype, randn

# (batch, heads, queries, keys, head dimension)
SHAPES = [(2, 3, 70, 77, 40), (1, 2, 130, 80, 64), (2, 1, 65, 154, 80), (1, 1, 33, 77, 160), (2, 2, 1, 1, 8)]
SHAPES += [(1, 2, 129, 4, 24), (1, 1, 200, 16, 40), (1, 2, 64, 160, 100), (1, 1, 40, 129, 17), (1, 2, 100, 64, 128)]


def operands(shape, dtype, device):
    """Heads taken out of the last dimension of products, keys and values out of one, as a UNet does."""
    batch, heads, queries, keys, size = shape
    q = randn(batch, queries, heads * size, dtype=dtype, device=device)
    both = randn(batch, keys, 2 * heads * size + 8, dtype=dtype, device=device)[..., 8:]
    return [x.unflatten(-1, (heads, size)).transpose(1, 2) for x in (q, *both.chunk(2, -1))]


def target(q, k, v, scale=None):
    return attention.reference(*(x.cpu().double() for x in (q, k, v)), scale=scale)


@half_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device, dtype, shape):
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("of bfloat16 the interpreter multiplies the bits")
    q, k, v = operands(shape, dtype, device)
    assert short_attention.takes(q, k, v, None)
    for scale in (None, 0.5):
        y = short_attention.launch(q, k, v, scale)
        assert y.shape == q.shape and y.dtype == dtype
        assert y.transpose(1, 2).is_contiguous()  # heads side by side, for the product that follows
        close_rows(y, target(q, k, v, scale))


def test_several_blocks_of_rows_for_each_program(device, monkeypatch):
    monkeypatch.setattr(short_attention, "multiprocessors", lambda device: 1)
    q, k, v = operands((1, 2, 600, 77, 40), torch.float16, device)  # 20 blocks for 3 programs
    close_rows(short_attention.launch(q, k, v, None), target(q, k, v))


def test_large_scores(device):
    q, k, v = operands((1, 2, 70, 77, 64), torch.float16, device)
    close_rows(short_attention.launch(60 * q, k, v, None), target(60 * q, k, v), scale=4)


def test_strides(device):
    q, k, v = operands((2, 3, 70, 77, 40), torch.float16, device)
    for some in (q.contiguous(), q[:, :, ::2], q.transpose(1, 2).contiguous().transpose(1, 2)[:, 1:]):
        keys = [x[:, : some.shape[1]] for x in (k.contiguous(), v)]
        y = short_attention.launch(some, *keys, None)
        close_rows(y, target(some, *keys))
    assert short_attention.launch(q.contiguous(), k, v, None).is_contiguous()


def test_nan_stays_in_its_row(device):
    q, k, v = operands((1, 1, 70, 77, 40), torch.float16, device)
    first = short_attention.launch(q, k, v, None)
    q[0, 0, 3, 5] = float("nan")
    y = short_attention.launch(q, k, v, None)
    assert y[0, 0, 3].isnan().all()
    y[0, 0, 3] = first[0, 0, 3]
    assert torch.equal(y, first)


def test_what_it_does_not_take(device):
    q, k, v = operands((2, 2, 70, 77, 40), torch.float16, device)
    assert short_attention.takes(q, k, v, None)
    assert not short_attention.takes(q, k, v, 0.0)
    assert not short_attention.takes(q, k, v, -1.0)
    assert not short_attention.takes(q[0], k[0], v[0], None)
    assert not short_attention.takes(q[:1], k, v, None)
    assert not short_attention.takes(q, k, v[:, :, :76], None)
    assert not short_attention.takes(q.float(), k.float(), v.float(), None)
    assert not short_attention.takes(q, k.to(torch.bfloat16), v, None)
    assert not short_attention.takes(*(x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)), None)
    assert not short_attention.takes(*operands((1, 1, 70, 161, 40), torch.float16, device), None)
    assert not short_attention.takes(*operands((1, 1, 70, 81, 160), torch.float16, device), None)
    assert not short_attention.takes(*operands((1, 1, 70, 77, 168), torch.float16, device), None)
    assert not short_attention.takes(q[:, :, :0], k, v, None)


def test_the_launcher_of_attention_takes_it(device, monkeypatch):
    monkeypatch.setattr(attention, "library", None)
    q, k, v = operands((2, 2, 70, 77, 40), torch.float16, device)
    close_rows(attention.launch(q, k, v, scale=0.3), target(q, k, v, 0.3))
    for options in ({"is_causal": True}, {"mask": torch.zeros(70, 77, dtype=torch.float16, device=device)}):
        with pytest.raises(TypeError):
            attention.launch(q, k, v, **options)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize("images", [2, 8, 16])
@pytest.mark.parametrize(
    ("heads", "queries", "keys", "size"),
    [
        (8, 4096, 77, 40),
        (8, 1024, 77, 80),
        (8, 256, 77, 160),
        (20, 1024, 77, 64),
        (10, 3952, 154, 64),
        (8, 7345, 16, 40),
    ],
)
def test_unet_shapes(dtype, images, heads, queries, keys, size):
    q, k, v = operands((images, heads, queries, keys, size), dtype, torch.device("cuda"))
    assert short_attention.takes(q, k, v, None)
    wanted = attention.reference(q.double(), k.double(), v.double()).cpu()
    close_rows(short_attention.launch(q, k, v, None), wanted)
