"""A UNet in fp32: what the errors of all other ways to compute it are measured against."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from sfast_ext.tools.lib.transformers import result_of

# computed at once: the rows of one image under guidance
ROWS = 2


@contextlib.contextmanager
def tf32(matmul: bool, conv: bool) -> Iterator[None]:
    """Within, the operands of float32 products, and of convolutions, may be rounded to TF32. Torch's own default is
    False, True; WebUIs have it for both."""
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    try:
        for flag, value in zip(flags, (matmul, conv)):
            flag.allow_tf32 = value
        yield
    finally:
        for flag, value in zip(flags, before):
            flag.allow_tf32 = value


def without_tf32() -> contextlib.AbstractContextManager[None]:
    """Within, products and convolutions of float32 are not rounded to TF32."""
    return tf32(False, False)


class Exact:
    """A UNet with the same weights in fp32, without TF32.

    Two rows of a batch at a time: of eight, cuDNN 9.19's convolution of 2560 channels at 32x32 is wrong by 85 % on an
    NVIDIA H200.
    """

    def __init__(self, unet: nn.Module) -> None:
        self._unet = nn.Module.to(copy.deepcopy(unet), torch.float32)

    @torch.no_grad()
    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Its first output for the arguments of a call, of which the first is the latent (N, C, H, W). Of a list of
        latents all are computed at once."""
        if not isinstance(args[0], torch.Tensor):
            wide, named = _in_fp32((args, kwargs))
            with without_tf32():
                return result_of(self._unet(*wide, **named))
        batch = args[0].shape[0]
        with without_tf32():
            parts = [rows((args, kwargs), batch, slice(first, first + ROWS)) for first in range(0, batch, ROWS)]
            return torch.cat([self._unet(*given, **named)[0] for given, named in map(_in_fp32, parts)])


def rows(value: Any, batch: int, which: slice) -> Any:
    """Of each tensor of a batch in a tree these rows; the rest as it is."""
    return tree_map_only(torch.Tensor, lambda x: x[which] if x.dim() and x.shape[0] == batch else x, value)


def _in_fp32(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda x: x.float() if x.is_floating_point() else x, value)
