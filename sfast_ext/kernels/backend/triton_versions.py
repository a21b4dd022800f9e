"""GPUs and dtypes that a version of Triton cannot compile for, whatever the kernel."""

from __future__ import annotations

import torch

_BLACKWELL_SINCE = (3, 3)
_LAST_BEFORE_BLACKWELL = (9, 0)
_BFLOAT16_ON_TURING_SINCE = (3, 3)
_AMPERE = (8, 0)


def unsupported(version: tuple[int, ...], capability: tuple[int, int], dtype: torch.dtype | None = None) -> str | None:
    """Why a version of Triton cannot compile for a compute capability, or not with a dtype there; None if it can, as
    far as is known.

    Args:
        version: major and minor.
        capability: compute capability of the GPU, major and minor.
        dtype: None asks about the capability alone.
    """
    if version < _BLACKWELL_SINCE and capability > _LAST_BEFORE_BLACKWELL:
        what = "does not know"
    elif dtype is torch.bfloat16 and version < _BFLOAT16_ON_TURING_SINCE and capability < _AMPERE:
        what = "has no bfloat16 for"
    else:
        return None
    name, card = ".".join(map(str, version[:2])), ".".join(map(str, capability))
    return f"Triton {name} {what} compute capability {card}: that came with Triton 3.3, which torch 2.7 brings"
