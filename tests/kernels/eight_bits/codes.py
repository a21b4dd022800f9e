"""Comparison of codes and scales with a reference."""

from __future__ import annotations

import torch
from torch import Tensor

# of a code: how far from the middle between two integers a quotient is that everybody rounds alike
_DECIDED = 1e-4


def same_codes(q: Tensor, scale: Tensor, values: Tensor, decided: float = _DECIDED, ulps: float = 1) -> None:
    """Compares with the codes of rows in float64: equal where the quotient is not in the middle between two integers.

    Args:
        decided: distance from that middle from which on codes must be equal.
        ulps: allowed difference of the scales, in units of their last place.
    """
    q, scale, values = q.cpu(), scale.cpu(), values.cpu().double()
    assert q.dtype == torch.int8 and scale.dtype == torch.float32
    assert q.shape == values.shape and scale.shape == values.shape[:-1]
    largest = values.abs().amax(-1)
    bad = ~largest.isfinite()
    assert torch.equal(scale.isnan(), bad)
    small = largest < 1e-30
    assert bool((scale[small] == 1).all()) and not q[small | bad].any()
    wanted = (largest / 127).float()
    wanted[small] = 1
    error = (scale.double() - wanted.double()).abs() / torch.finfo(torch.float32).eps / wanted.double()
    assert bool((error[~bad] <= ulps).all()), f"{error[~bad].max()} units of the last place"
    rows = values[~(bad | small)] / wanted[~(bad | small)].double()[..., None]
    codes = q[~(bad | small)].double()
    assert bool((codes.abs() <= 127).all())
    near = (rows - rows.floor() - 0.5).abs() < decided
    assert bool((near | (codes == rows.round())).all())
    assert bool(((codes - rows).abs() <= 0.5 + decided).all())
