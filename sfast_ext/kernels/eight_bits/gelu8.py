"""GELU (Hendrycks and Gimpel 2016) whose result is int8 with a scale for each row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext.kernels.backend.registry import kernel
from sfast_ext.kernels.eight_bits import quantise_rows, swiglu8


def reference(
    x: Tensor, approximate: str = "none", group: int = 0, joined: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(q (..., N) int8, scale (...) float32) of GELU of x, as `quantise_rows.reference` has them.

    Args:
        joined: (..., M), whose columns stand in front of those of GELU.

    Computes in float32 (float64 if x is): GELU is not rounded in between.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return quantise_rows.reference(swiglu8.behind(joined, F.gelu(wide, approximate=approximate)), group)


@kernel(reference, portable=True, cuda_sources=(swiglu8.SOURCE,))
def launch(
    x: Tensor, approximate: str = "none", group: int = 0, joined: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`reference` in one launch; dtypes and sizes as of `swiglu8.launch`."""
    return swiglu8.activated(x, None, group, tanh=approximate == "tanh", joined=joined)
