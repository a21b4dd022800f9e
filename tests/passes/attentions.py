"""One attention layer, written in the ways that hosts write it: each is softmax(Q @ K^T / sqrt(D)) @ V."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, einsum, nn
from torch.nn import functional as F

HEADS, WIDTH = 4, 6
SCALE = WIDTH**-0.5


class Layer(nn.Module):
    """Projections to and from heads of `WIDTH` channels, around an attention over them."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        channels, context, inner = 24, 10, HEADS * WIDTH
        self.to_q = nn.Linear(channels, inner, bias=False)
        self.to_k, self.to_v = (nn.Linear(context, inner, bias=False) for _ in range(2))
        self.to_out = nn.Linear(inner, channels)
        self.attend = attend

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """x (N, L, 24), context (N, S, 10) -> (N, L, 24)."""
        return self.to_out(self.attend(self.to_q(x), self.to_k(context), self.to_v(context))) + x


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As AUTOMATIC1111 and diffusers call PyTorch's own."""
    batch = q.shape[0]
    q, k, v = (x.view(batch, -1, HEADS, WIDTH).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, -1, HEADS * WIDTH)


def apart(x: Tensor) -> Tensor:
    """(N, L, H * D) -> (N * H, L, D), as einops writes it."""
    batch, tokens, _ = x.shape
    return x.reshape(batch, tokens, HEADS, WIDTH).permute(0, 2, 1, 3).reshape(batch * HEADS, tokens, WIDTH)


def together(x: Tensor) -> Tensor:
    """(N * H, L, D) -> (N, L, H * D)."""
    rows, tokens, _ = x.shape
    return x.reshape(rows // HEADS, HEADS, tokens, WIDTH).permute(0, 2, 1, 3).reshape(-1, tokens, HEADS * WIDTH)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By two matmuls, the scores scaled in between: ldm."""
    q, k, v = map(apart, (q, k, v))
    scores = einsum("b i d, b j d -> b i j", q, k) * SCALE
    return together(einsum("b i j, b j d -> b i d", scores.softmax(dim=-1), v))


def by_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Over four dimensions, without einsum."""
    q, k, v = (x.view(x.shape[0], -1, HEADS, WIDTH).transpose(1, 2) for x in (q, k, v))
    out = torch.softmax(q @ k.transpose(-2, -1) / WIDTH**0.5, -1) @ v
    return out.transpose(1, 2).flatten(2)


def by_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """diffusers' processor before PyTorch 2."""
    q, k, v = map(apart, (q, k, v))
    start = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    scores = torch.baddbmm(start, q, k.transpose(-1, -2), beta=0, alpha=SCALE)
    return together(torch.bmm(scores.softmax(dim=-1).to(q.dtype), v))


def slices_of_queries(size: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Keys scaled beforehand, so many queries at a time into a tensor of zeros: Doggettx."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = map(apart, (q, k * SCALE, v))
        out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype)
        for start in range(0, q.shape[1], size):
            end = min(start + size, q.shape[1])
            scores = einsum("b i d, b j d -> b i j", q[:, start:end], k).softmax(dim=-1, dtype=q.dtype)
            out[:, start:end] = einsum("b i j, b j d -> b i d", scores, v)
        return together(out.to(q.dtype))

    return attend


def slices_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two heads at a time, scores scaled where they lie: AUTOMATIC1111's V1."""
    q, k, v = map(apart, (q, k, v))
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype)
    for start in range(0, q.shape[0], 2):
        end = start + 2
        scores = einsum("b i d, b j d -> b i j", q[start:end], k[start:end])
        scores *= SCALE
        out[start:end] = einsum("b i j, b j d -> b i d", scores.softmax(dim=-1), v[start:end])
    return together(out)


def chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Chunks of queries by baddbmm, all keys at once: the sub-quadratic one."""
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(end_dim=1) for x in (q, k, v))
    out = torch.zeros_like(q)
    for start in range(0, q.shape[1], 5):
        part = torch.narrow(q, 1, start, min(5, q.shape[1] - start))
        scores = torch.baddbmm(torch.zeros(1, 1, 1, dtype=q.dtype), part, k.transpose(1, 2), alpha=SCALE, beta=0)
        done = torch.bmm(scores.softmax(dim=-1), v.to(q.dtype)).to(v.dtype)
        out[:, start : start + done.shape[1], :] = done
    return out.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(start_dim=2)


def slices_of_both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads at a time, and of these queries at a time."""
    q, k, v = map(apart, (q, k, v))
    out = torch.zeros_like(q)
    for start in range(0, q.shape[0], 4):
        heads = slice(start, start + 4)
        for at in range(0, q.shape[1], 7):
            scores = torch.bmm(q[heads, at : at + 7], k[heads].transpose(1, 2)) * SCALE
            out[heads, at : at + 7] = torch.bmm(scores.softmax(-1), v[heads])
    return together(out)


def in_float(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Upcast: all of it in float32."""
    return plain(q.float(), k.float(), v.float()).to(q.dtype)


def sdpa_in_float(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same through PyTorch's own."""
    return sdpa(q.float(), k.float(), v.float()).to(q.dtype)


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": plain,
    "matmul": by_matmul,
    "baddbmm": by_baddbmm,
    "one slice": slices_of_queries(1000),
    "slices of queries": slices_of_queries(4),
    "slices of queries, one left": slices_of_queries(12),
    "slices of heads": slices_of_heads,
    "chunks": chunks,
}
