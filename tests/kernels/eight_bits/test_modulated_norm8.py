"""Modulated norms and activations whose result is int8: codes and scales against float64, rotated and not."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from kernels.eight_bits.codes import same_codes
from kernels.support import randn
from sfast_ext.kernels.backend import registry
from sfast_ext.kernels.eight_bits import gated_norm8, gelu8, modulated_norm8, quantise_rows, swiglu8
from sfast_ext.kernels.pointwise import gated_residual, modulated_norm, swiglu

HALF, BRAIN = torch.float16, torch.bfloat16
SHAPES = [(BRAIN, 1, 2, 3840, 256), (HALF, 3, 2, 77, 0), (HALF, 2, 3, 1536, 128), (BRAIN, 2, 2, 2, 192, 64)]
"""A dtype, the shape, and how many neighbours are rotated."""
LOOSE = {"decided": 3e-3, "ulps": 100}
"""float32 adds up to some thousand values, multiplies by three vectors, and adds up to 256 again."""


@pytest.fixture
def device(quantiser_device):
    return quantiser_device


def wide(*given):
    return [t.double() if isinstance(t, torch.Tensor) else t for t in given]


def per_sample(shape, dtype, device, count=1):
    """Vectors of samples as a model has them: parts of a wider product, not next to each other."""
    whole = randn(shape[0], *[1] * (len(shape) - 2), (count + 1) * shape[-1], dtype=dtype, device=device)
    return whole.chunk(count + 1, -1)[1:]


def turned(values, group):
    return quantise_rows.rotated(values, group)


@pytest.mark.thinned("given", "rms")
@pytest.mark.parametrize("rms", [True, False], ids=["RMS", "layer"])
@pytest.mark.parametrize("given", SHAPES, ids=str)
def test_norms(device, rms, given):
    dtype, *shape, group = given
    x, y = (randn(*shape, dtype=dtype, device=device, mean=0.5) for _ in range(2))
    weight, inner = (randn(shape[-1], dtype=dtype, device=device) for _ in range(2))
    gate, scale, shift = per_sample(shape, dtype, device, 3)
    norm = (weight, None, 1e-5, scale, None if rms else shift, rms, True)
    same_codes(*modulated_norm8.launch(x, *norm, group=group), turned(
        modulated_norm.reference(*wide(x, *norm)), group), **LOOSE)  # fmt: skip
    gated = (x, y, gate, inner if rms else None, 1e-5 if rms else None, rms)
    total, *codes = gated_norm8.launch(*gated, *norm, group=group)
    assert torch.equal(total, gated_residual.launch(*gated))
    same_codes(*codes, turned(modulated_norm.reference(*wide(total, *norm)), group), **LOOSE)


ACTIVATIONS = {
    "SwiGLU": (swiglu8.launch, swiglu.reference, 2, {}),
    "GELU": (gelu8.launch, F.gelu, 1, {}),
    "GELU by tanh": (gelu8.launch, F.gelu, 1, {"approximate": "tanh"}),
}


@pytest.mark.thinned("given", "what")
@pytest.mark.parametrize("what", ACTIVATIONS)
@pytest.mark.parametrize("given", [*SHAPES, (BRAIN, 1, 2, 10240, 256), (HALF, 1, 1, 1, 0)], ids=str)
def test_activations(device, what, given):
    dtype, *shape, group = given
    launch, exact, count, options = ACTIVATIONS[what]
    # halves of a packed product, as a plan has them
    packed = randn(*shape[:-1], 2 * shape[-1], dtype=dtype, device=device, std=2.0)
    operands = packed.chunk(2, -1)[:count]
    wanted = turned(exact(*wide(*operands), **options), group)
    same_codes(*launch(*operands, **options, group=group), wanted, decided=3e-3, ulps=200)


JOINED = [(BRAIN, (2, 5), 64, 192, 64), (HALF, (3,), 5, 2, 0), (BRAIN, (1, 2), 3072, 12288, 256)]
JOINED += [(HALF, (7,), 24, 40, 64)]
"""A dtype, the rows, the columns in front and of the activation, and how many neighbours are rotated."""


@pytest.mark.thinned("given", "what", turn=1)
@pytest.mark.parametrize("what", ACTIVATIONS)
@pytest.mark.parametrize("given", JOINED, ids=str)
def test_activations_behind_other_columns(device, what, given):
    dtype, rows, first, second, group = given
    launch, exact, count, options = ACTIVATIONS[what]
    packed = randn(*rows, 2 * second, dtype=dtype, device=device, std=2.0)
    operands = packed.chunk(2, -1)[:count]
    for joined in (
        randn(*rows, first, dtype=dtype, device=device),
        randn(*rows, first + 32, dtype=dtype, device=device)[..., 16:-16],
    ):
        wanted = torch.cat([joined.double(), exact(*wide(*operands), **options)], -1)
        codes = launch(*operands, **options, group=group, joined=joined)
        same_codes(*codes, turned(wanted, group), decided=3e-3, ulps=200)


def test_the_error_of_gelu_is_below_that_of_codes(device):
    """GELU by a polynomial, of relative error 1e-5, decides few codes."""
    x = randn(4, 4096, dtype=torch.bfloat16, device=device, std=2.0)
    q, scale = gelu8.launch(x)
    error = q.double() * scale.double()[:, None] - F.gelu(x.double())
    assert bool((error.abs() <= 0.501 * scale.double()[:, None]).all())


@pytest.mark.parametrize("group", [0, 64])
def test_rows_of_zeros_and_of_what_is_no_number(device, group):
    x = randn(1, 9, 64, dtype=torch.float16, device=device)
    x[0, 1] = 0
    x[0, 2, 5], x[0, 3, 6], x[0, 4, 7] = math.nan, math.inf, -math.inf
    for q, scale in (
        modulated_norm8.launch(x, None, None, 1e-6, group=group),
        swiglu8.launch(x, torch.ones_like(x), group=group),
        gelu8.launch(x, group=group),
    ):
        assert bool(scale[0, 2].isnan()) and bool(scale[0, 3].isnan()) and not q[0, 1:4].any()
        assert scale[0, 1] == 1 and bool(scale[0, 5:].isfinite().all()) and bool(q[0, 5:].any())


def test_odd_places(device):
    whole = randn(2, 3, 200, dtype=torch.bfloat16, device=device)
    for start in (1, 4, 8):
        x, scale = whole[..., start : start + 96], whole[:, :1, start : start + 96]
        codes = modulated_norm8.launch(x, None, None, 1e-5, scale)
        same_codes(*codes, modulated_norm.reference(*wide(x, None, None, 1e-5, scale)), **LOOSE)
        given = x, whole[..., :96]
        same_codes(*swiglu8.launch(*given), swiglu.reference(*wide(*given)), decided=3e-3, ulps=9)


REFUSED = {
    "float32": lambda x: (swiglu8, (x.float(), x.float())),
    "two shapes": lambda x: (swiglu8, (x[:, :1], x)),
    "a rotation of other columns": lambda x: (gelu8, (x[..., :40], "none", 64)),
    "a rotation of rows at odd places": lambda x: (gelu8, (x[..., 1:65], "none", 64)),
    "other rows in front": lambda x: (gelu8, (x, "none", 0, x[:1])),
    "columns of another dtype in front": lambda x: (gelu8, (x, "none", 0, x.bfloat16())),
    "columns in front that are no multiple of 8, rotated": lambda x: (gelu8, (x[..., :60], "none", 64, x[..., :4])),
    "rows that are too long": lambda x: (gelu8, (torch.ones(1, 70000, dtype=torch.float16, device=x.device),)),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_does_not_take(device, what, monkeypatch):
    counted = []
    monkeypatch.setattr(registry.Kernel, "count", lambda kernel, reason: counted.append(str(reason)))
    module, given = REFUSED[what](randn(2, 3, 128, dtype=torch.float16, device=device))
    try:
        ours = module.launch(*given)
    except (ValueError, RuntimeError) as exc:  # the reference says so itself
        assert counted and ("rotat" in what or "other rows" in what), exc
        return
    assert len(counted) == 1
    for a, b in zip(ours, module.reference(*given), strict=True):
        assert torch.equal(a, b)


def test_no_rows(device):
    x = randn(2, 0, 64, dtype=torch.float16, device=device)
    for q, scale in (modulated_norm8.launch(x, None, None, 1e-6), swiglu8.launch(x, x), gelu8.launch(x, group=64)):
        assert q.shape == x.shape and q.dtype == torch.int8 and scale.shape == (2, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 4352, 3840), (2, 4352, 2304), (2, 4096, 2048)], ids=str)
def test_shapes_of_transformers(shape):
    dtype, device = torch.bfloat16, torch.device("cuda")
    x, y = (randn(*shape, dtype=dtype, device=device, std=2.0) for _ in range(2))
    weight, inner = (randn(shape[-1], dtype=dtype, device=device) for _ in range(2))
    gate, scale = per_sample(shape, dtype, device, 2)
    norm = (weight, None, 1e-5, scale, None, True, True)
    for group in (0, 256):
        total, *codes = gated_norm8.launch(x, y, gate, inner, 1e-5, True, *norm, group=group)
        same_codes(*codes, turned(modulated_norm.reference(*wide(total, *norm)), group), **LOOSE)
    packed = randn(4352, 2 * 10240, dtype=dtype, device=device)
    same_codes(*swiglu8.launch(*packed.chunk(2, -1), group=256), turned(
        swiglu.reference(*wide(*packed.chunk(2, -1))), 256), decided=3e-3, ulps=200)  # fmt: skip
    joined, values = randn(4352, 3072, dtype=dtype, device=device), packed[:, 3072:15360]
    wanted = torch.cat([joined.double(), F.gelu(values.double(), approximate="tanh")], -1)
    same_codes(*gelu8.launch(values, "tanh", 256, joined), turned(wanted, 256), decided=3e-3, ulps=200)
