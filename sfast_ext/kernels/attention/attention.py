"""Scaled dot product attention by our kernels, or by the fastest of torch's backends."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from sfast_ext.kernels.attention import (
    flash_attention,
    gemm_attention,
    mma_attention,
    short_attention,
    xformers_backends,
)
from sfast_ext.kernels.backend import choices
from sfast_ext.kernels.backend.choices import Run
from sfast_ext.kernels.backend.nvrtc import Unavailable
from sfast_ext.kernels.backend.registry import Kernel, register
from sfast_ext.kernels.backend.triton_runtime import capability, device_of, hopper, is_dry_run

# With so few keys and so few rows of queries in all, cuDNN's planning (40 ms per shape) and its launch that clears
# counters weigh most. For wide heads the other backends are faster even without those.
_FEW_KEYS = 128
_FEW_ROWS = 16384
_WIDE = 64
_WIDEST_OF_FLASH = 128
_MMA, _HALF_SUMS, _GEMMS = "mma", "mma, faster sums", "gemms"


def _preference() -> tuple[Any, dict[str, list[Any]]] | None:
    """torch's sdpa_kernel and the backends in order of priority, by the first; None where this torch has no
    priority."""
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if "set_priority" not in inspect.signature(sdpa_kernel).parameters:
            return None
        cudnn, flash, efficient = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
        return sdpa_kernel, {
            "cudnn": [cudnn, flash, efficient, SDPBackend.MATH],
            "flash": [flash, cudnn, efficient, SDPBackend.MATH],
            "efficient": [efficient, cudnn, flash, SDPBackend.MATH],
        }
    except (ImportError, AttributeError):
        return None


_PREFERENCE = _preference()
# not F.scaled_dot_product_attention, which SD.Next and others replace
_sdpa = torch._C._nn.scaled_dot_product_attention
_choices = choices.Choices("attention")
_refused: set[tuple[torch.device, str]] = set()  # shapes that a preferred backend accepted and then raised on


def first(q: Tensor, k: Tensor) -> str:
    """The backend tried first on Hopper, "cudnn", "flash" or "efficient", by measurements on an NVIDIA H200."""
    rows, size = q.numel() // q.shape[-1], q.shape[-1]
    if k.shape[-2] > _FEW_KEYS or rows > _FEW_ROWS or size <= _WIDE:
        return "cudnn"
    return "flash" if size <= _WIDEST_OF_FLASH else "efficient"


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    faster_sums: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention: q (..., L, D), k (..., S, D), v (..., S, E) -> (..., L, E).

    Args:
        faster_sums: whether sums may be in half precision; here they are not.
    """
    return _sdpa(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    faster_sums: bool = False,
) -> Tensor:
    """`reference` by one of our kernels where it is applicable, else by `fallback`."""
    if mask is None and not is_causal:
        if short_attention.applicable(q, k, v, scale):
            return short_attention.launch(q, k, v, scale)
        if flash_attention.applicable(q, k, v, scale):
            try:
                return flash_attention.launch(q, k, v, scale)
            except Unavailable:
                pass  # logged; `available` is False from now on
    return fallback(q, k, v, mask, is_causal, scale, faster_sums)


def fallback(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    faster_sums: bool = False,
) -> Tensor:
    """`reference` by the fastest of our kernel for any card, torch's backends, xformers' kernels where the host has
    imported those, and for wide heads in float32 two GEMMs.

    A shape that was not measured (`choices`) runs by ours where it is applicable; on Hopper only with few keys, else in
    the order of `first`. Any strides; synchronises only to measure.
    """
    if is_dry_run() and _by_mma(q, k, v, mask, is_causal, scale) and _expected(q, k) == _MMA:
        return mma_attention.launch(q, k, v, scale, faster_sums and mma_attention.sums_in_half(k))  # compiled ahead
    if not q.is_cuda:
        return reference(q, k, v, mask, is_causal, scale)
    return _fastest(q, k, v, mask, is_causal, scale, faster_sums)


def _fastest(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    faster_sums: bool,
) -> Tensor:
    key = _key(q, k, v, mask, is_causal)
    others = _backends(q, k, v, mask, is_causal, scale)
    foreign = xformers_backends.candidates(q, k, v, mask, is_causal, scale)
    others.update(foreign)
    expected = choices.OWN
    if _by_mma(q, k, v, mask, is_causal, scale):
        others[_MMA] = functools.partial(mma_attention.launch, q, k, v, scale)
        expected = _expected(q, k)
        if faster_sums and mma_attention.sums_in_half(k):
            others[_HALF_SUMS] = functools.partial(mma_attention.launch, q, k, v, scale, half_sums=True)
            expected = _HALF_SUMS
    if mask is None and not is_causal and gemm_attention.applicable(q, k, v):
        others[_GEMMS] = functools.partial(gemm_attention.launch, q, k, v, scale)
        if capability(q.device) >= gemm_attention.TF32_SINCE:
            expected = _GEMMS
    if not others:
        return _preferred(key, q, k, v, mask, is_causal, scale)
    own = functools.partial(_preferred, key, q, k, v, mask, is_causal, scale)
    return _choices.run(q.device, key, own, others, expected, sure=hopper(q.device) and not foreign)


def _by_mma(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> bool:
    return mask is None and not is_causal and mma_attention.applicable(q, k, v, scale)


def _expected(q: Tensor, k: Tensor) -> str:
    """Which is expected to be the fastest. On Hopper, where all was measured, torch's kernels have instructions that
    `mma_attention` has not; these do not matter with few keys."""
    few = k.shape[-2] <= mma_attention.MOST_AT_ONCE
    return _MMA if few or not hopper(device_of(q)) else choices.OWN


def _key(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> str:
    """What the time depends on; what a person needs to know stands first."""

    def size(x: Tensor) -> str:
        return "x".join(map(str, x.shape))

    kind = str(q.dtype).removeprefix("torch.")
    masked = "" if mask is None else f", mask {size(mask)} {mask.dtype}"
    memory = [tuple(x.stride()) for x in (q, k, v, mask) if x is not None]
    return f"{size(q)} on {size(k)} {kind}{', causal' * is_causal}{masked}; values {size(v)}, strides {memory}"


def _backends(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> dict[str, Run]:
    """torch's backends by name, each with the others behind it: none is switched off, which other threads would see.
    Empty where torch has no priority, and where only one takes such heads."""
    if _PREFERENCE is None or q.shape[-1] > gemm_attention.WIDE:
        return {}
    sdpa_kernel, orders = _PREFERENCE

    def runner(name: str) -> Run:
        def run() -> Tensor:
            with sdpa_kernel(orders[name], set_priority=True):
                return reference(q, k, v, mask, is_causal, scale)

        return run

    return {name: runner(name) for name in orders}


def _preferred(
    key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """By torch's choice, on Hopper in the order of `first`. A backend may accept a shape and then fail to plan it: from
    then on torch's choice runs that shape."""
    if _PREFERENCE is None or (q.device, key) in _refused or not hopper(q.device):
        return reference(q, k, v, mask, is_causal, scale)
    sdpa_kernel, orders = _PREFERENCE
    try:
        with sdpa_kernel(orders[first(q, k)], set_priority=True):
            return reference(q, k, v, mask, is_causal, scale)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError:
        out = reference(q, k, v, mask, is_causal, scale)  # raises where torch cannot either
        _refused.add((q.device, key))
        return out


KERNEL = register(
    Kernel(
        "attention",
        reference,
        launch,
        fallback,
        triton_functions=(short_attention.short_attention_kernel,),
        cuda_sources=(flash_attention._SOURCE, mma_attention._SOURCE),
    )
)
