"""The attentions that WebUIs offer, as attention processors of diffusers: a UNet runs with each as it does in the host.

AUTOMATIC1111's own are written anew after what was published of them: Doggettx (slices of the queries), V1 (two heads
at a time), InvokeAI (slices of the heads or of the queries) and sub-quadratic attention ("Self-attention Does Not Need
O(n²) Memory", arXiv:2112.05682). The others are diffusers' processors.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, einsum, nn

from sfast_ext.call_signature import autocast_mode
from sfast_ext.tools.lib import Unavailable

SCORES = "b i d, b j d -> b i j"
VALUES = "b i j, b j d -> b i d"
QUERY_CHUNK = 1024
"""Queries that sub-quadratic attention takes at a time."""
MAX_SLICES = 64

_measured: dict[torch.device, int] = {}


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a GPU; without a limit elsewhere.

    While a CUDA graph is captured it is what it was before: the driver is not asked then.
    """
    if device.type != "cuda":
        return sys.maxsize
    if torch.cuda.is_current_stream_capturing() and device in _measured:
        return _measured[device]
    stats = torch.cuda.memory_stats(device)
    idle = stats.get("reserved_bytes.all.current", 0) - stats.get("active_bytes.all.current", 0)
    _measured[device] = torch.cuda.mem_get_info(device)[0] + idle
    return _measured[device]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, heads · channels) as (batch · heads, tokens, channels)."""
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, heads, width // heads).permute(0, 2, 1, 3).reshape(batch * heads, tokens, -1)


def join_heads(x: Tensor, heads: int) -> Tensor:
    """(batch · heads, tokens, channels) as (batch, tokens, heads · channels)."""
    rows, tokens, channels = x.shape
    x = x.reshape(rows // heads, heads, tokens, channels).permute(0, 2, 1, 3)
    return x.reshape(rows // heads, tokens, heads * channels)


def _empty_result(q: Tensor, v: Tensor) -> Tensor:
    return torch.zeros(q.shape[0], q.shape[1], v.shape[2], device=q.device, dtype=q.dtype)


def _bytes_of_scores(q: Tensor, k: Tensor) -> int:
    return q.shape[0] * q.shape[1] * k.shape[1] * q.element_size()


def doggettx(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float, slices: int | None = None) -> Tensor:
    """Attention over (batch, tokens, heads · channels), some queries at a time if memory is short.

    Args:
        slices: into how many the queries are cut; by default as many as free memory asks for, a power of two.

    Raises:
        RuntimeError: more than `MAX_SLICES` slices would be needed.
    """
    q, k, v = (split_heads(t, heads) for t in (q, k * scale, v))
    result = _empty_result(q, v)
    if slices is None:
        free, slices = free_memory(q.device), 1
        needed = _bytes_of_scores(q, k) * (3 if q.element_size() == 2 else 2.5)
        while needed > free * slices:
            slices *= 2
        if slices > MAX_SLICES:
            raise RuntimeError(f"not enough memory for attention: {needed / 2**30:.1f} GB asked for, {free} bytes free")
    step = max(1, q.shape[1] // slices)
    for start in range(0, q.shape[1], step):
        end = min(start + step, q.shape[1])
        weights = einsum(SCORES, q[:, start:end], k).softmax(dim=-1, dtype=q.dtype)
        result[:, start:end] = einsum(VALUES, weights, v)
    return join_heads(result, heads)


def v1(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    """Attention over (batch, tokens, heads · channels), two heads at a time."""
    q, k, v = (split_heads(t, heads) for t in (q, k, v))
    result = _empty_result(q, v)
    for start in range(0, q.shape[0], 2):
        end = start + 2
        scores = einsum(SCORES, q[start:end], k[start:end])
        scores *= scale
        result[start:end] = einsum(VALUES, scores.softmax(dim=-1), v[start:end])
    return join_heads(result, heads)


def invokeai(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float, slices: int | None = None) -> Tensor:
    """Attention over (batch, tokens, heads · channels), some heads at a time, or some queries of all heads.

    Args:
        slices: into how many all is cut: up to one for each head of each row of the batch the heads are, above that
            the queries; by default as many as free memory asks for, a power of two.
    """
    q, k, v = (split_heads(t, heads) for t in (q, k * scale, v))
    if slices is None:
        # a third of what is free, in MB: what is computed on the way is copied, and memory is in pieces
        most, size = free_memory(q.device) / 3.3 / 2**20, _bytes_of_scores(q, k) >> 20
        if size <= most:
            return join_heads(_at_once(q, k, v), heads)
        slices = 1 << int((size - 1) / max(most, 1e-9)).bit_length()
    result = _empty_result(q, v)
    if slices <= q.shape[0]:
        step = q.shape[0] // slices
        for start in range(0, q.shape[0], step):
            end = start + step
            result[start:end] = _at_once(q[start:end], k[start:end], v[start:end])
    else:
        step = max(q.shape[1] // slices, 1)
        for start in range(0, q.shape[1], step):
            end = start + step
            result[:, start:end] = _at_once(q[:, start:end], k, v)
    return join_heads(result, heads)


def _at_once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = einsum(SCORES, q, k)
    return einsum(VALUES, scores.softmax(dim=-1, dtype=scores.dtype), v)


def subquad(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float, slices: int | None = None) -> Tensor:
    """Attention over (batch, tokens, heads · channels), some queries at a time, and some keys if memory is short.

    Args:
        slices: into how many the queries are cut; by default 1,024 queries are in each.
    """
    q, k, v = (split_heads(t, heads) for t in (q, k, v))
    queries, keys = q.shape[1], k.shape[1]
    chunk = QUERY_CHUNK if slices is None else -(-queries // slices)
    limit = int(0.7 * free_memory(q.device))
    if _bytes_of_scores(q, k) <= limit:
        attend = functools.partial(_all_keys, scale=scale)
    else:
        each = limit // (q.shape[0] * q.element_size() * (k.shape[2] + v.shape[2]))
        attend = functools.partial(_keys_in_chunks, scale=scale, chunk=min(keys, max(int(keys**0.5), each)))
    if queries <= chunk:
        return join_heads(attend(q, k, v), heads)
    result = torch.zeros_like(q)
    for start in range(0, queries, chunk):
        part = attend(q.narrow(1, start, min(chunk, queries - start)), k, v)
        result[:, start : start + part.shape[1], :] = part
    return join_heads(result, heads)


def _scaled_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    nothing = torch.zeros(1, 1, 1, device=q.device, dtype=q.dtype)
    return torch.baddbmm(nothing, q, k.transpose(1, 2), alpha=scale, beta=0)


def _all_keys(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    weights = _scaled_scores(q, k, scale).softmax(dim=-1)
    return torch.bmm(weights, v.to(weights.dtype)).to(v.dtype)


def _keys_in_chunks(q: Tensor, k: Tensor, v: Tensor, scale: float, chunk: int) -> Tensor:
    """The softmax over all keys out of that of each chunk: sums of exponentials over the largest score."""
    values, sums, largest = [], [], []
    for start in range(0, k.shape[1], chunk):
        length = min(chunk, k.shape[1] - start)
        scores = _scaled_scores(q, k.narrow(1, start, length), scale)
        top = scores.amax(dim=-1, keepdim=True)
        exponentials = torch.exp(scores - top)
        part = v.narrow(1, start, length)
        values.append(torch.bmm(exponentials, part.to(exponentials.dtype)).to(v.dtype))
        sums.append(exponentials.sum(dim=-1, keepdim=True))
        largest.append(top)
    tops = torch.stack(largest)
    factors = torch.exp(tops - tops.amax(dim=0, keepdim=True))
    total = (torch.stack(values) * factors).sum(dim=0)
    return (total / (torch.stack(sums) * factors).sum(dim=0)).to(v.dtype)


def sdp(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    """PyTorch's scaled dot product attention over (batch, tokens, heads · channels)."""
    batch, width = q.shape[0], v.shape[2]
    q, k, v = (t.view(batch, -1, heads, t.shape[2] // heads).transpose(1, 2) for t in (q, k, v))
    result = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=False)
    return result.transpose(1, 2).reshape(batch, -1, width)


def xformers(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    """xformers' memory-efficient attention over (batch, tokens, heads · channels), heads in their own dimension."""
    batch, width = q.shape[0], v.shape[2]
    q, k, v = (t.reshape(batch, t.shape[1], heads, -1) for t in (q, k, v))
    return xformers_ops().memory_efficient_attention(q, k, v, attn_bias=None).reshape(batch, -1, width)


def xformers_ops() -> Any:
    """The module xformers.ops.

    Raises:
        Unavailable: it cannot be imported.
    """
    try:
        import xformers.ops as ops
    except Exception as exc:  # one built for another torch raises anything
        raise Unavailable(
            f"xformers cannot be imported ({type(exc).__name__}: {exc}): install the version made for torch "
            f"{torch.__version__}, or take another attention"
        ) from exc
    return ops


_OWN: dict[str, Callable[..., Tensor]] = {
    "sdp": sdp, "xformers": xformers, "doggettx": doggettx, "v1": v1, "invokeai": invokeai, "subquad": subquad,
}  # fmt: skip
NAMES = ("sdp", "plain", "sliced", "xformers", "doggettx", "v1", "invokeai", "subquad")
IN_SLICES = frozenset({"sliced", "doggettx", "invokeai", "subquad"})
"""Those whose number of slices can be forced."""


class Processor:
    """An attention of AUTOMATIC1111's in the place of diffusers' own.

    Args:
        name: one of "sdp", "xformers", "doggettx", "v1", "invokeai" and "subquad".
        upcast: queries, keys and values are computed with in fp32 ("upcast cross attention to float32"), and without
            autocast; sub-quadratic attention leaves the values as they are.
        slices: a number to force, if the attention has one; it may be set anew between calls.
    """

    def __init__(self, name: str, *, upcast: bool = False, slices: int | None = None) -> None:
        self.name, self.upcast, self.slices = name, upcast, slices

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """(batch, tokens, width) attended to itself or to (batch, other tokens, width of the context).

        Raises:
            ValueError: there is a mask, which these attentions do not take.
        """
        if attention_mask is not None:
            raise ValueError(f"the attention {self.name!r} takes no mask; choose 'sdp' or 'plain' of diffusers")
        layers: Any = attn
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = layers.to_q(hidden_states), layers.to_k(context), layers.to_v(context)
        dtype = q.dtype
        more = {"slices": self.slices} if self.name in IN_SLICES and self.slices is not None else {}
        with self._precision(q.device):
            if self.upcast:
                q, k, v = q.float(), k.float(), v if self.name == "subquad" else v.float()
            result = _OWN[self.name](q, k, v, layers.heads, layers.scale, **more)
        project, dropout = layers.to_out
        return dropout(project(result.to(dtype)))

    def _precision(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if self.upcast and autocast_mode(device.type):
            return torch.autocast(device.type, enabled=False)
        return contextlib.nullcontext()


def attention_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Name and module of each attention whose processor can be exchanged."""
    return [(name, m) for name, m in model.named_modules() if hasattr(m, "processor") and hasattr(m, "to_q")]


def install(model: nn.Module, name: str, *, upcast: bool = False, slices: int | None = None) -> None:
    """Give its own processor to each attention of a diffusers model.

    Args:
        name: one of `NAMES`.
        upcast: scores are computed in fp32.
        slices: a number of slices to force, for those in `IN_SLICES`.

    Raises:
        Unavailable: the attention, or this combination, cannot be had; nothing was changed.
    """
    layers = [attn for _, attn in attention_layers(model)]
    if not layers:
        raise Unavailable(f"{type(model).__name__} has no attention processors: only diffusers' models have")
    made = [make(name, attn, upcast=upcast, slices=slices) for attn in layers]
    for attn, processor in zip(layers, made):
        attn.upcast_attention = upcast
        attn.set_processor(processor)


def make(name: str, attn: nn.Module, *, upcast: bool = False, slices: int | None = None) -> Any:
    """A processor for one attention of diffusers; see `install`."""
    if name not in NAMES:
        raise Unavailable(f"no attention is called {name!r}; there are {', '.join(NAMES)}")
    if slices is not None and (name not in IN_SLICES or slices < 1):
        raise Unavailable(f"the attention {name!r} cannot be cut into {slices} slices")
    from diffusers.models import attention_processor as theirs

    layer: Any = attn
    if name == "plain":
        return theirs.AttnProcessor()
    if name == "sliced":
        # diffusers counts the heads in a slice, and slices nothing but heads
        return theirs.SlicedAttnProcessor(max(1, layer.heads // (slices or 2)))
    if name == "xformers":
        xformers_ops()
    if not upcast and name == "sdp":
        return theirs.AttnProcessor2_0()
    if not upcast and name == "xformers":
        if theirs.xformers is None:
            raise Unavailable("diffusers did not find xformers when it was imported: install it, and start anew")
        return theirs.XFormersAttnProcessor()
    _refuse_further(name, layer)
    return Processor(name, upcast=upcast, slices=slices)


def _refuse_further(name: str, attn: Any) -> None:
    """These do what cross attention in a UNet does, and no more."""
    norms = ("group_norm", "spatial_norm", "norm_cross", "norm_q", "norm_k")
    found = [norm for norm in norms if getattr(attn, norm, None) is not None]
    if found or attn.residual_connection or attn.rescale_output_factor != 1:
        words = ", ".join(found) or "a residual or a factor of its own"
        raise Unavailable(f"the attention {name!r} is for UNets of Stable Diffusion; this one has {words}")


def force_slices(model: nn.Module, slices: int | None) -> None:
    """Another number of slices for the processors of this room that a model has; None asks the free memory again."""
    for _, attn in attention_layers(model):
        if isinstance(attn.processor, Processor):
            attn.processor.slices = slices
