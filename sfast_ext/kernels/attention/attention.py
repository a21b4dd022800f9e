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
from sfast_ext.kernels.attention.operands import Operands
from sfast_ext.kernels.backend import choices
from sfast_ext.kernels.backend.choices import Run
from sfast_ext.kernels.backend.registry import SLOWER, Declined, kernel
from sfast_ext.kernels.backend.triton_runtime import capability, device_of, hopper, is_dry_run
from sfast_ext.kernels.eight_bits import mma_attention8

# With so few keys and so few rows of queries in all, cuDNN's planning (40 ms per shape) and its launch that clears
# counters weigh most. For wide heads the other backends are faster even without those.
_FEW_KEYS = 128
_FEW_ROWS = 16384
_WIDE = 64
_MAX_SIZE_OF_FLASH = 128
_MMA, _HALF_SUMS, _GEMMS, _EIGHT_BITS = "mma", "mma, faster sums", "gemms", "mma, 8 bits"
_FAR = 0.1
"""Relative L2 error of a result with 8-bit integers that is taken for a failure. What is lost by them was measured when
the layer was selected, see passes/eight_bits_selection.py."""


def _preference() -> tuple[Any, dict[str, list[Any]]] | None:
    """torch's sdpa_kernel and the backends in order of priority, by the first; None if this torch has no
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
_choices = choices.Choices("attention")
_failed: set[tuple[torch.device, str]] = set()  # shapes that a preferred backend accepted and then raised on


def first(q: Tensor, k: Tensor) -> str:
    """The backend tried first on Hopper, "cudnn", "flash" or "efficient", by measurements on an NVIDIA H200."""
    rows, size = q.numel() // q.shape[-1], q.shape[-1]
    if k.shape[-2] > _FEW_KEYS or rows > _FEW_ROWS or size <= _WIDE:
        return "cudnn"
    return "flash" if size <= _MAX_SIZE_OF_FLASH else "efficient"


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    faster_sums: bool = False,
    eight_bits: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention: q (..., L, D), k (..., S, D), v (..., S, E) -> (..., L, E). Heads of k and v may
    be shared, see `Operands`.

    Args:
        faster_sums: whether sums may be in half precision; here they are not.
        eight_bits: whether products of queries and keys may be of 8-bit integers; here they are not.
    """
    return Operands(q, k, v, mask, is_causal, scale).by_torch()


def fallback(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    faster_sums: bool = False,
    eight_bits: bool = False,
) -> Tensor:
    """`reference` by the fastest of our kernel for any card, torch's backends, xformers' kernels if the host has
    imported those, and for wide heads in float32 two GEMMs.

    A shape that was not measured (`choices`) runs by ours if that accepts it; on Hopper only with few keys, else in the
    order of `first`. Any strides; synchronises only to measure.
    """
    operands = Operands(q, k, v, mask, is_causal, scale)
    if operands.shared > 1:
        return _shared(operands, faster_sums, eight_bits) if q.is_cuda else reference(*operands)
    if is_dry_run() and _by_mma(operands) and _expected(q, k) == _MMA:
        # compiled ahead
        if eight_bits and _in_8_bits(operands):
            mma_attention8.launch(q, k, v, scale, faster_sums and mma_attention.sums_in_half(k))
        return mma_attention.launch(q, k, v, scale, faster_sums and mma_attention.sums_in_half(k))
    return _fastest(operands, faster_sums, eight_bits) if q.is_cuda else reference(*operands)


@kernel(
    reference,
    fallback=fallback,
    needs_triton=False,
    triton_functions=(short_attention.short_attention_kernel,),
    cuda_sources=(flash_attention._SOURCE, mma_attention._SOURCE, *mma_attention8.SOURCES),
)
def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    faster_sums: bool = False,
    eight_bits: bool = False,
) -> Tensor:
    """`reference` by `short_attention` or `flash_attention`, which take no mask, and q (B, H, L, D), k and v
    (B, H, S, D) in half precision on Hopper; else by `fallback`, which takes what torch does."""
    operands = Operands(q, k, v, mask, is_causal, scale)
    if operands.shared > 1:
        return _shared(operands, faster_sums, eight_bits)
    if operands.masked:
        raise Declined("a mask")
    unfit = short_attention.accepts(q, k, v, scale)
    if unfit is None:
        return short_attention.launch(q, k, v, scale)
    also_unfit = flash_attention.accepts(q, k, v, scale)
    if also_unfit is None and flash_attention.profitable(q, k):
        return flash_attention.launch(q, k, v, scale)
    raise Declined(f"for few keys: {unfit}; for many: {also_unfit or SLOWER}")


def _fastest(operands: Operands, faster_sums: bool, eight_bits: bool = False) -> Tensor:
    q, k, v, scale = operands.unmasked
    key = _key(operands)
    others = _backends(operands)
    foreign = xformers_backends.candidates(operands)
    others.update(foreign)
    expected = choices.OWN
    if _by_mma(operands):
        others[_MMA] = functools.partial(mma_attention.launch, q, k, v, scale)
        expected = _expected(q, k)
        if faster_sums and mma_attention.sums_in_half(k):
            others[_HALF_SUMS] = functools.partial(mma_attention.launch, q, k, v, scale, half_sums=True)
            expected = _HALF_SUMS
    if eight_bits and _in_8_bits(operands):
        half_sums = faster_sums and mma_attention.sums_in_half(k)
        others[_EIGHT_BITS] = functools.partial(mma_attention8.launch, q, k, v, scale, half_sums=half_sums)
        expected = _EIGHT_BITS
    if not operands.masked and gemm_attention.accepts(q, k, v) is None:
        others[_GEMMS] = functools.partial(gemm_attention.launch, q, k, v, scale)
        if capability(q.device) >= gemm_attention.TF32_SINCE:
            expected = _GEMMS
    own = functools.partial(_preferred, key, operands)
    if not others:
        return own()
    sure = hopper(q.device) and not foreign
    return _choices.run(q.device, key, own, others, expected, sure=sure, limits={_EIGHT_BITS: _FAR})


def _shared(operands: Operands, faster_sums: bool, eight_bits: bool) -> Tensor:
    """By torch's kernels that read shared heads where they are, or by a copy for each of q's: what is faster."""

    def own() -> Tensor:
        return launch(*operands.repeated(), faster_sums, eight_bits)

    if is_dry_run() or not operands.reads_shared_heads():
        return own()
    others = {"shared heads": functools.partial(_read_shared, operands)}
    return _choices.run(operands.q.device, _key(operands), own, others)


def _read_shared(operands: Operands) -> Tensor:
    if _PREFERENCE is None or not hopper(operands.q.device):
        return operands.in_place()
    sdpa_kernel, orders = _PREFERENCE
    with sdpa_kernel(orders[first(operands.q, operands.k)], set_priority=True):
        return operands.in_place()


def _by_mma(operands: Operands) -> bool:
    return not operands.masked and mma_attention.accepts(*operands.unmasked) is None


def _in_8_bits(operands: Operands) -> bool:
    """Whether the kernel takes them, on a card where it may be the fastest."""
    if operands.masked or hopper(device_of(operands.q)):
        return False
    return mma_attention8.accepts(*operands.unmasked) is None


def _expected(q: Tensor, k: Tensor) -> str:
    """Which is expected to be the fastest. On Hopper, where all was measured, torch's kernels have instructions that
    `mma_attention` has not; these do not matter with few keys."""
    few = k.shape[-2] <= mma_attention.MAX_KEYS_AT_ONCE
    return _MMA if few or not hopper(device_of(q)) else choices.OWN


def _key(operands: Operands) -> str:
    """What the time depends on; what a person needs to know stands first."""
    q, k, v, mask, is_causal, _ = operands

    def size(x: Tensor) -> str:
        return "x".join(map(str, x.shape))

    kind = str(q.dtype).removeprefix("torch.")
    masked = "" if mask is None else f", mask {size(mask)} {mask.dtype}"
    memory = [tuple(x.stride()) for x in (q, k, v, mask) if x is not None]
    return f"{size(q)} on {size(k)} {kind}{', causal' * is_causal}{masked}; values {size(v)}, strides {memory}"


def _backends(operands: Operands) -> dict[str, Run]:
    """torch's backends by name, each with the others behind it: none is switched off, which other threads would see.
    Empty if torch has no priority, and if only one takes such heads."""
    if _PREFERENCE is None or operands.q.shape[-1] > gemm_attention.WIDE:
        return {}
    return {name: functools.partial(_in_order, name, operands) for name in _PREFERENCE[1]}


def _in_order(first: str, operands: Operands) -> Tensor:
    assert _PREFERENCE is not None
    sdpa_kernel, orders = _PREFERENCE
    with sdpa_kernel(orders[first], set_priority=True):
        return operands.by_torch()


def _preferred(key: str, operands: Operands) -> Tensor:
    """By torch's choice, on Hopper in the order of `first`. A backend may accept a shape and then fail to plan it: from
    then on torch's choice runs that shape."""
    device = operands.q.device
    if _PREFERENCE is None or (device, key) in _failed or not hopper(device):
        return operands.by_torch()
    try:
        return _in_order(first(operands.q, operands.k), operands)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError:
        out = operands.by_torch()  # raises if torch cannot either
        _failed.add((device, key))
        return out
