"""What the attention kernels share: their operands and which are accepted, tensor maps and block sizes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sfast_ext.kernels.backend import nvrtc
from sfast_ext.kernels.backend.triton_runtime import MAX_GRID_YZ, accepts, accepts_products, next_power_of_2

MIN_SIZE = 16  # smallest dimension of tl.dot
_MAX_OFFSET = 2**31
# not F.scaled_dot_product_attention, which SD.Next and others replace
_sdpa = torch._C._nn.scaled_dot_product_attention


class Operands(NamedTuple):
    """Of an attention: q (..., L, D), k (..., S, D), v (..., S, E), a mask as of F.scaled_dot_product_attention.

    k (B, H, S, D) and v may have fewer heads than q: each is then that of as many neighbours among q's.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None

    @property
    def masked(self) -> bool:
        return self.mask is not None or self.is_causal

    @property
    def unmasked(self) -> tuple[Tensor, Tensor, Tensor, float | None]:
        """The operands of kernels that take no mask."""
        return self.q, self.k, self.v, self.scale

    @property
    def shared(self) -> int:
        """How many heads of q have one of k and v; 1 if torch broadcasts them in another way."""
        if not self.q.dim() == self.k.dim() == self.v.dim() == 4:
            return 1
        of_q, of_k, of_v = (x.shape[1] for x in (self.q, self.k, self.v))
        return of_q // of_k if of_k == of_v and of_k and of_q % of_k == 0 and of_q > of_k else 1

    def repeated(self) -> Operands:
        """With a head of k and v for each of q, by a copy if they are shared. It is laid out as (B, S, H, D)."""
        count = self.shared
        if count == 1:
            return self

        def each(x: Tensor) -> Tensor:
            rows = x.transpose(1, 2).unsqueeze(3)
            return rows.expand(-1, -1, -1, count, -1).flatten(2, 3).transpose(1, 2)

        return self._replace(k=each(self.k), v=each(self.v))

    def by_torch(self) -> Tensor:
        """(..., L, E), by torch's choice of its backends."""
        q, k, v, mask, is_causal, scale = self.repeated()
        return _sdpa(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)

    def in_place(self) -> Tensor:
        """`by_torch`, whose kernels read the shared heads where they are, see `reads_shared_heads`."""
        more: dict[str, Any] = {"enable_gqa": True}
        return _sdpa(self.q, self.k, self.v, attn_mask=self.mask, is_causal=self.is_causal, scale=self.scale, **more)

    def reads_shared_heads(self) -> bool:
        """Whether one of torch's fused kernels does so; else it would repeat them, or store all scores."""
        if not self.q.is_cuda:
            return False  # torch would ask the driver, also if there is none
        cuda = torch.backends.cuda
        try:
            # another number of arguments before torch 2.5
            given = cuda.SDPAParams(self.q, self.k, self.v, self.mask, 0.0, self.is_causal, True)
        except (AttributeError, TypeError):
            return False
        able = (cuda.can_use_flash_attention, getattr(cuda, "can_use_cudnn_attention", lambda given: False))
        return any(each(given) for each in able)


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, half_sums: bool = False) -> Tensor:
    """F.scaled_dot_product_attention without a mask. half_sums: whether sums may be in half precision; here they are
    not."""
    return Operands(q, k, v, scale=scale).by_torch()


def accepts_in_triton(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> str | None:
    """Why no kernel in Triton takes q (B, H, L, D), k and v (B, H, S, D); None if one can, on a GPU where it was
    measured."""
    return accepts(q, k, v) or accepts_products(q) or accepts_layout(q, k, v, scale)


def accepts_layout(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> str | None:
    """Why kernels do not take shapes, strides and scale of q (B, H, L, D), k and v (B, H, S, D); None if they do."""
    if q.dim() != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        return "other shapes than (B, H, L, D) and twice (B, H, S, D)"
    if not q.numel() or not k.numel() or not (scale is None or scale > 0):
        return "no elements, or a scale that is not positive"
    if any(x.dtype != q.dtype or x.stride(3) != 1 for x in (q, k, v)) or q.shape[0] * q.shape[1] > MAX_GRID_YZ:
        return "several dtypes, too many heads, or heads whose elements are apart"
    # offsets within an image are 32-bit
    if all(x.shape[1] * x.stride(1) + x.shape[2] * x.stride(2) < _MAX_OFFSET for x in (q, k, v)):
        return None
    return "offsets beyond 32 bits"


def accepts_alignment(*tensors: Tensor) -> str | None:
    """Why TMA cannot address the tensors (`heads_map`): pointers or strides are no multiples of 16 bytes; else None."""
    aligned = not any(x.data_ptr() % 16 or any(stride % 8 for stride in x.stride()[:3]) for x in tensors)
    return None if aligned else "rows that are not aligned to 16 bytes"


def heads_map(x: Tensor, columns: int, keys: int) -> Any:
    """A TMA tensor map over (B, H, S, D) with boxes of so many columns and keys of a head, zeros out of bounds."""
    images, heads, count, size = x.shape
    image, row, head = (stride * x.element_size() for stride in strides(x))
    return nvrtc.tensor_map(x, [size, heads, count, images], [head, row, image], [columns, 1, keys, 1])


def blocks(size: int) -> tuple[int, int]:
    """Two powers of two, the second may be 0, whose sum covers `size` with little padding: 77 -> 64 and 16."""
    first = max(MIN_SIZE, next_power_of_2(size + 1) // 2)
    if size <= first:
        return first, 0
    second = max(MIN_SIZE, next_power_of_2(size - first))
    return (2 * first, 0) if second == first else (first, second)


def like_queries(q: Tensor) -> Tensor:
    """An uninitialised result with q's shape and order of strides."""
    order = sorted(range(4), key=lambda dim: -q.stride(dim))
    out = torch.empty([q.shape[dim] for dim in order], dtype=q.dtype, device=q.device)
    return out.permute([order.index(dim) for dim in range(4)])


def in_base_2(scale: float | None, size: int) -> float:
    """The factor of scores before exp2: scale * log2(e), with SDPA's default scale if it is None."""
    return (size**-0.5 if scale is None else scale) * math.log2(math.e)


def strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of images, rows and heads."""
    return x.stride(0), x.stride(2), x.stride(1)
