from __future__ import annotations

import pytest
import torch

from sfast_ext.kernels import attention, flash_attention

from .support import close_rows, half_dtype, randn

# (batch, heads, queries, keys, head dimension)
SHAPES = [(2, 3, 70, 300, 64), (1, 2, 256, 256, 64), (1, 1, 33, 129, 64), (2, 2, 1, 1, 64), (1, 2, 65, 128, 64)]


def operands(shape, dtype, device):
    """Heads taken out of the last dimension of one product, as a UNet does."""
    batch, heads, queries, keys, size = shape
    packed = randn(batch, max(queries, keys), 3 * heads * size, dtype=dtype, device=device)
    q, k, v = (x.unflatten(-1, (heads, size)).transpose(1, 2) for x in packed.chunk(3, -1))
    return [q[:, :, :queries], k[:, :, :keys], v[:, :, :keys]]


def target(q, k, v, scale=None):
    return attention.reference(*(x.cpu().double() for x in (q, k, v)), scale=scale)


@half_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device, dtype, shape):
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("of bfloat16 the interpreter multiplies the bits")
    q, k, v = operands(shape, dtype, device)
    assert flash_attention.takes(q, k, v, None)
    for scale in (None, 0.5):
        y = flash_attention.launch(q, k, v, scale)
        assert y.shape == q.shape and y.dtype == dtype
        assert y.transpose(1, 2).is_contiguous()  # heads side by side, for the product that follows
        close_rows(y, target(q, k, v, scale))


def test_large_scores(device):
    q, k, v = operands((1, 2, 70, 300, 64), torch.float16, device)
    close_rows(flash_attention.launch(60 * q, k, v, None), target(60 * q, k, v), scale=4)


def test_strides(device):
    q, k, v = operands((2, 3, 70, 200, 64), torch.float16, device)
    for some in (q.contiguous(), q[:, :, ::2], q.transpose(1, 2).contiguous().transpose(1, 2)[:, 1:]):
        keys = [x[:, : some.shape[1]] for x in (k.contiguous(), v)]
        y = flash_attention.launch(some, *keys, None)
        close_rows(y, target(some, *keys))
    assert flash_attention.launch(q.contiguous(), k, v, None).is_contiguous()


def test_nan_stays_in_its_row(device):
    q, k, v = operands((1, 1, 70, 200, 64), torch.float16, device)
    first = flash_attention.launch(q, k, v, None)
    q[0, 0, 3, 5] = float("nan")
    y = flash_attention.launch(q, k, v, None)
    assert y[0, 0, 3].isnan().all()
    y[0, 0, 3] = first[0, 0, 3]
    assert torch.equal(y, first)


def test_what_it_does_not_take(device):
    q, k, v = operands((2, 2, 70, 200, 64), torch.float16, device)
    assert flash_attention.takes(q, k, v, None)
    assert not flash_attention.takes(q, k, v, 0.0)
    assert not flash_attention.takes(q, k, v, -1.0)
    assert not flash_attention.takes(q[0], k[0], v[0], None)
    assert not flash_attention.takes(q[:1], k, v, None)
    assert not flash_attention.takes(q, k, v[:, :, :199], None)
    assert not flash_attention.takes(q.float(), k.float(), v.float(), None)
    assert not flash_attention.takes(q, k.to(torch.bfloat16), v, None)
    assert not flash_attention.takes(*(x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)), None)
    assert not flash_attention.takes(*operands((1, 1, 70, 200, 80), torch.float16, device), None)
    odd = randn(2, 70, 2, 72, dtype=torch.float16, device=device)[..., 4:68].transpose(1, 2)  # not at 16 bytes
    assert flash_attention.takes(odd, k, v, None) and not flash_attention.takes(q, odd, odd, None)
    assert not flash_attention.takes(q[:, :, :0], k, v, None)


def test_the_launcher_of_attention_takes_it(device, monkeypatch):
    monkeypatch.setattr(attention, "library", None)
    q, k, v = operands((2, 2, 70, 200, 64), torch.float16, device)
    close_rows(attention.launch(q, k, v, scale=0.3), target(q, k, v, 0.3))
    for options in ({"is_causal": True}, {"mask": torch.zeros(70, 200, dtype=torch.float16, device=device)}):
        with pytest.raises(TypeError):
            attention.launch(q, k, v, **options)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(
    ("images", "heads", "queries", "keys"),
    [(2, 20, 1024, 1024), (2, 20, 988, 988), (1, 10, 2304, 2304), (7, 5, 333, 1999)],
)
def test_unet_shapes(dtype, images, heads, queries, keys):
    q, k, v = operands((images, heads, queries, keys, 64), dtype, torch.device("cuda"))
    assert flash_attention.takes(q, k, v, None)
    wanted = attention.reference(q.double(), k.double(), v.double()).cpu()
    close_rows(flash_attention.launch(q, k, v, None), wanted)


@pytest.mark.gpu
def test_many_programs_are_left_to_the_library():
    q, k, v = operands((2, 10, 4096, 4096, 64), torch.float16, torch.device("cuda"))
    assert not flash_attention.takes(q, k, v, None)
