"""A UNet in fp32: what the errors of all other ways to compute it are measured against."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

# computed at once: the rows of one picture under guidance
ROWS = 2


class Exact:
    """A UNet with the same weights in fp32, without TF32.

    Two rows of a batch at a time: of eight, cuDNN 9.19's convolution of 2560 channels at 32x32 is wrong by 85 % on an
    NVIDIA H200.
    """

    def __init__(self, unet: nn.Module) -> None:
        self._unet = nn.Module.to(copy.deepcopy(unet), torch.float32)

    @torch.no_grad()
    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Its first output for the arguments of a call, of which the first is the latent (N, C, H, W)."""
        batch = args[0].shape[0]
        flags = torch.backends.cuda.matmul, torch.backends.cudnn
        before = [flag.allow_tf32 for flag in flags]
        try:
            for flag in flags:
                flag.allow_tf32 = False
            parts = [rows((args, kwargs), batch, slice(first, first + ROWS)) for first in range(0, batch, ROWS)]
            return torch.cat([self._unet(*_in_fp32(given), **_in_fp32(named))[0] for given, named in parts])
        finally:
            for flag, value in zip(flags, before):
                flag.allow_tf32 = value


def error(output: torch.Tensor, exact: torch.Tensor) -> float:
    """The relative error of an output, in L2 and fp32."""
    return float(torch.linalg.vector_norm(output.float() - exact) / torch.linalg.vector_norm(exact))


def rows(value: Any, batch: int, which: slice) -> Any:
    """Of each tensor of a batch in tuples and dicts these rows; the rest as it is."""
    if isinstance(value, torch.Tensor):
        return value[which] if value.dim() and value.shape[0] == batch else value
    if isinstance(value, dict):
        return {name: rows(item, batch, which) for name, item in value.items()}
    return tuple(rows(item, batch, which) for item in value) if isinstance(value, tuple) else value


def _in_fp32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _in_fp32(item) for name, item in value.items()}
    return tuple(map(_in_fp32, value)) if isinstance(value, tuple) else value
