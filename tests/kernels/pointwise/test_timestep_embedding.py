from __future__ import annotations

import math

import pytest
import torch

from kernels.support import DTYPES, each_dtype
from sfast_ext.kernels.pointwise import timestep_embedding

TOLERANCE = {torch.float32: 2e-7, torch.float16: 5e-4, torch.bfloat16: 8e-3}


def frequencies(half, device):
    return torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)[None].to(device)


def _check(t, frequency, sine_first, dtype=None):
    y = timestep_embedding.launch(t, frequency, sine_first, dtype)
    # the angle is rounded to float32 by everybody; from there on in float64
    angle = (t.cpu().float() * frequency.cpu().reshape(1, -1)).double()
    parts = [angle.sin(), angle.cos()]
    target = torch.cat(parts if sine_first else parts[::-1], -1)
    assert y.dtype == (dtype or torch.float32) and y.shape == target.shape
    assert (y.cpu().double() - target).abs().max() <= TOLERANCE[y.dtype]


@each_dtype
@pytest.mark.parametrize("half", [160, 128, 1, 3, 257])
def test_sizes(device, dtype, half):
    t = torch.tensor([[0.0], [999.0], [500.5], [1.0]], device=device)
    for sine_first in (True, False):
        _check(t, frequencies(half, device), sine_first, dtype)


@pytest.mark.parametrize("kind", [*DTYPES, torch.int32, torch.int64], ids=str)
def test_kinds_of_timesteps(device, kind):
    t = torch.tensor([981, 3, 1024], device=device).to(kind)[:, None]
    _check(t, frequencies(160, device), False, torch.float16)
    # one for all images, as a host expands it; the frequencies without their first dimension
    _check(t[:1].expand(4, 1), frequencies(16, device)[0], True)


def test_what_the_kernel_does_not_take(device):
    t, frequency = torch.tensor([[7]], device=device), frequencies(8, device)
    for some, each in ((t.double(), frequency.double()), (t.to(torch.uint8), frequency), (t[:0], frequency)):
        y = timestep_embedding.launch(some, each, True)
        torch.testing.assert_close(y, timestep_embedding.reference(some, each, True))


def test_reference_is_torch():
    t, frequency = torch.tensor([[7], [999]]), frequencies(8, torch.device("cpu"))
    angle = t.float() * frequency
    assert torch.equal(timestep_embedding.reference(t, frequency, True), torch.cat([angle.sin(), angle.cos()], -1))
    half = timestep_embedding.reference(t, frequency, False, torch.float16)
    assert torch.equal(half, torch.cat([angle.cos(), angle.sin()], -1).half())
