from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn import functional as F

from kernels.support import randn
from sfast_ext.kernels.attention import attention
from sfast_ext.kernels.attention.operands import Operands
from sfast_ext.kernels.backend import choices

# (batch, heads, queries, keys, head dimension)
SHAPES = [(2, 8, 64, 77, 40), (1, 1, 63, 63, 17), (2, 3, 1, 5, 160), (1, 2, 100, 1, 64), (2, 2, 33, 33, 8)]
SHAPES += [(2, 8, 64, 64, 160), (1, 8, 256, 77, 160), (2, 4, 100, 77, 80)]

# Relative L2 error against float64; the probabilities are rounded to the dtype before the second product.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # float32 may run as tf32

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _half_on_cpu() -> bool:
    x = torch.zeros(1, 1, 1, 8, dtype=torch.float16)
    try:
        attention.reference(x, x, x)
    except RuntimeError:
        return False
    return True


def _check(q, k, v, **kwargs):
    mask = kwargs.pop("mask", None)
    wide = mask.double() if mask is not None and mask.is_floating_point() else mask
    target = attention.reference(q.double(), k.double(), v.double(), wide, **kwargs)
    y = attention.launch(q, k, v, mask, **kwargs)
    assert y.dtype == q.dtype
    assert y.shape == target.shape
    assert ((y.double() - target).norm() / target.norm()).item() < TOLERANCE[q.dtype]


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(where, dtype, shape):
    batch, heads, queries, keys, size = shape
    device = torch.device(where)
    if where == "cpu" and dtype == torch.float16 and not _half_on_cpu():
        pytest.skip("this torch has no attention in float16 on a CPU")
    # heads taken out of the last dimension of a packed product, as a UNet does
    packed = randn(batch, queries, heads * size * 2, dtype=dtype, device=device)
    q = packed[..., : heads * size].unflatten(-1, (heads, size)).transpose(1, 2)
    packed = randn(batch, keys, heads * size * 2, dtype=dtype, device=device)
    k, v = (part.unflatten(-1, (heads, size)).transpose(1, 2) for part in packed.chunk(2, -1))
    _check(q, k, v)
    _check(q, k, v, scale=0.3)
    _check(q, k, v, is_causal=True)
    _check(q, k, v, mask=randn(batch, 1, queries, keys, dtype=dtype, device=device))
    keep = torch.ones(queries, keys, dtype=torch.bool, device=device)
    keep[:, 1::2] = False
    _check(q, k, v, mask=keep)


@pytest.mark.parametrize("where", DEVICES)
def test_three_dimensions(where):
    q, k, v = (randn(6, 9, 40, dtype=torch.float32, device=torch.device(where)) for _ in range(3))
    _check(q, k, v)


@pytest.mark.parametrize(
    ("queries", "keys", "wanted"),
    [
        ((2, 8, 4096, 40), 4096, "cudnn"),
        ((2, 8, 4096, 40), 77, "cudnn"),
        ((2, 8, 1024, 80), 1024, "cudnn"),
        ((2, 8, 1024, 80), 77, "flash"),
        ((8, 8, 1024, 80), 77, "cudnn"),
        ((2, 8, 256, 160), 77, "efficient"),
        ((2, 8, 64, 160), 64, "efficient"),
        ((2, 20, 1024, 64), 77, "cudnn"),
    ],
)
def test_who_is_asked_first(queries, keys, wanted):
    q, k = torch.empty(queries, device="meta"), torch.empty((*queries[:2], keys, queries[3]), device="meta")
    assert attention.first(q, k) == wanted


def test_the_key_tells_all_that_the_time_depends_on():
    q, k = torch.empty(2, 8, 64, 40, dtype=torch.float16), torch.empty(2, 8, 77, 40, dtype=torch.float16)
    mask = torch.empty(64, 77)
    plain = attention._key(Operands(q, k, k, None, False))
    assert plain.startswith("2x8x64x40 on 2x8x77x40 float16; ")
    other = [
        attention._key(Operands(q.mT.contiguous().mT, k, k, None, False)),
        attention._key(Operands(q, k, k.mT.contiguous().mT, None, False)),
        attention._key(Operands(q, k, k[..., :8], None, False)),
        attention._key(Operands(q.bfloat16(), k, k, None, False)),
        attention._key(Operands(q, k, k, None, True)),
        attention._key(Operands(q, k, k, mask, False)),
        attention._key(Operands(q, k, k, mask.half(), False)),
        attention._key(Operands(q, k, k, mask.t().contiguous().t(), False)),
    ]
    assert len({plain, *other}) == 9


@pytest.mark.gpu
def test_a_backend_that_fails_to_plan(monkeypatch):
    calls = []

    @contextlib.contextmanager
    def refusing(backends, set_priority):
        calls.append(backends)
        raise RuntimeError("No execution plans support the graph.")
        yield

    monkeypatch.setattr(attention, "_PREFERENCE", (refusing, dict.fromkeys(["cudnn", "flash", "efficient"], ["any"])))
    monkeypatch.setattr(attention, "_failed", set())
    q = randn(1, 2, 16, 64, dtype=torch.float16, device=torch.device("cuda"))
    for _ in range(2):
        _check(q, q, q, is_causal=True)
    assert len(calls) == 1


@pytest.mark.gpu
def test_torchs_own_choice_is_left_as_it_was():
    flags = [getattr(torch.backends.cuda, f"{name}_sdp_enabled") for name in ("flash", "mem_efficient", "math")]
    before = [flag() for flag in flags]
    q = randn(1, 2, 16, 64, dtype=torch.float16, device=torch.device("cuda"))
    attention.fallback(q, q, q)
    assert [flag() for flag in flags] == before


@pytest.mark.parametrize("where", DEVICES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("heads", "shared", "size"), [(24, 8, 96), (4, 2, 12), (6, 1, 64), (32, 8, 128)])
def test_shared_heads(where, masked, heads, shared, size):
    device, dtype = torch.device(where), torch.bfloat16
    packed = randn(2, 130, (heads + 2 * shared) * size, dtype=dtype, device=device)
    parts = packed.split([n * size for n in (heads, shared, shared)], 2)
    q, k, v = (x.unflatten(2, (-1, size)).transpose(1, 2) for x in parts)
    mask = randn(2, 1, 1, 130, dtype=dtype, device=device) > -1 if masked else None
    k_of_each, v_of_each = (x.repeat_interleave(heads // shared, 1) for x in (k, v))
    target = attention.reference(q.double(), k_of_each.double(), v_of_each.double(), mask)
    with choices.measuring(None, thorough=True):
        found = attention.launch(q, k, v, mask)
    assert found.shape == target.shape and found.dtype == dtype
    assert float((found.double() - target).norm() / target.norm()) < TOLERANCE[dtype]


@pytest.mark.parametrize("counts", [(1, 4, 4), (4, 1, 4), (4, 4, 1), (1, 4, 1), (1, 1, 4)], ids=str)
def test_heads_that_torch_broadcasts(counts):
    q, k, v = (torch.randn(2, count, 20, 16) for count in counts)
    assert Operands(q, k, v).shared == 1
    torch.testing.assert_close(attention.launch(q, k, v), F.scaled_dot_product_attention(q, k, v))
