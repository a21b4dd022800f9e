from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from sfast_ext.kernels.attention import query_attention as kernel
from sfast_ext.passes.attention import attention
from sfast_ext.passes.query_attention import fused_linears, query_attention
from sfast_ext.passes.rewrite import is_weight, shape

from .support import Traced, Whole, randn

CPU = torch.device("cpu")
HALF = torch.bfloat16
# images, rows, heads and columns of a head are as many, so that no shape tells dimensions from each other
X, PROMPT = randn(4, 4, 16).to(HALF), randn(4, 5, 24).to(HALF)


@pytest.fixture(autouse=True)
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel, also if it would not pay."""
    monkeypatch.setattr(kernel, "profitable", lambda images, rows, keys, depth, device: True)


class Block(nn.Module):
    def __init__(self, body: Callable[..., Any], bias: bool = False) -> None:
        super().__init__()
        self.q = nn.Linear(16, 16, bias=bias)
        self.kv = nn.Linear(24, 32)
        self.body = body

    def forward(self, x: Tensor, prompt: Tensor) -> Any:
        kv = self.kv(prompt).unflatten(-1, (2, 4, 4)).transpose(1, 3)
        return self.body(self, x, kv[:, :, 0], kv[:, :, 1])

    def heads(self, x: Tensor, dims: tuple[int, int] = (1, 2)) -> Tensor:
        return self.q(x).view(4, 4, 4, 4).transpose(*dims)


def sdpa(m: Block, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


def attend(m: Block, x: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return sdpa(m, m.heads(x), k, v, **options)


def traced_as(body: Callable[..., Any], dtype: torch.dtype = HALF, triton: bool = True, **options: Any) -> Traced:
    traced = Traced(Block(body, **options).to(dtype), X.to(dtype), PROMPT.to(dtype))
    traced.ctx.triton = triton
    return traced


def of_rows(*size: int) -> Callable[..., Tensor]:
    """Rows as another number of images, or none, which queries are cut into first."""
    return lambda m, x, k, v: sdpa(m, m.q(x.sin().reshape(*size, 16)).view(4, 4, 4, 4).transpose(1, 2), k, v)


TAKEN: dict[str, tuple[Callable[..., Any], float | None]] = {
    "as it is": (attend, None),
    "a scale": (lambda *args: attend(*args, scale=0.3), 0.3),
    "nothing else, in words": (lambda *args: attend(*args, attn_mask=None, dropout_p=0.0, is_causal=False), None),
    "dimensions the other way round": (lambda m, x, k, v: sdpa(m, m.heads(x, (2, 1)), k, v), None),
    "dimensions from the end": (lambda m, x, k, v: sdpa(m, m.heads(x, (-2, -3)), k, v), None),
    "another reshape": (lambda m, x, k, v: sdpa(m, m.q(x).unflatten(-1, (4, 4)).transpose(1, 2), k, v), None),
    "rows of all images": (of_rows(16), None),
    "rows of two images": (of_rows(2, 8), None),
    "rows that others see": (lambda m, x, k, v: (y := x.sin(), attend(m, y, k, v)), None),
    "keys that others see": (lambda m, x, k, v: (k.sin(), v.cos(), attend(m, x, k, v)), None),
}


@pytest.mark.parametrize("what", TAKEN)
def test_the_queries_go_into_the_attention(what: str) -> None:
    body, scale = TAKEN[what]
    traced = traced_as(body)
    (node,) = traced.find("scaled_dot_product_attention")
    (q, k, v), users, size = node.args, list(node.users), shape(node)
    heads = q.args[0]
    linear = heads.args[0]
    weight = linear.args[1]
    assert traced.rewrite(query_attention) == 1
    (new,) = traced.launches(kernel)
    assert new.args[1:] == (weight, k, v) and is_weight(weight) and new.kwargs == {"scale": scale}
    assert shape(new.args[0]) == (4, 4, 16) and shape(new) == size and list(new.users) == users
    assert all(gone._erased for gone in (node, q, heads, linear))
    assert traced.rewrite(attention) == 0
    assert traced.error() < 2e-2


def test_one_after_another() -> None:
    traced = traced_as(lambda m, x, k, v: attend(m, attend(m, x, k, v).transpose(1, 2).reshape(4, 4, 16), k, v))
    assert traced.rewrite(query_attention) == 2
    one, other = traced.launches(kernel)
    assert one.args[2:] == other.args[2:] and traced.ops()["linear"] == 1  # of keys and values
    assert traced.error() < 2e-2


def seen(which: str) -> Callable[..., Any]:
    """What is between the linear layer and the attention, used a second time."""

    def body(m: Block, x: Tensor, k: Tensor, v: Tensor) -> Any:
        linear = m.q(x)
        heads = linear.view(4, 4, 4, 4)
        q = heads.transpose(1, 2)
        return sdpa(m, q, k, v), {"linear": linear, "heads": heads, "queries": q}[which].sin()

    return body


def write(which: str) -> Callable[..., Any]:
    def body(m: Block, x: Tensor, k: Tensor, v: Tensor) -> Any:
        x, k, v = x.sin(), k.sin(), v.sin()
        linear = m.q(x)
        heads = linear.view(4, 4, 4, 4)
        q = heads.transpose(1, 2)
        y = sdpa(m, q, k, v)
        written = {"rows": x, "keys": k, "values": v, "linear": linear, "heads": heads, "queries": q, "result": y}
        written[which].mul_(2)
        return y.sin()

    return body


def two(m: Block, x: Tensor, k: Tensor, v: Tensor) -> Any:
    q = m.heads(x)
    return sdpa(m, q, k, v), sdpa(m, q, v, k)


def masked(m: Block, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(m, x, k, v, attn_mask=k[:, :, :4, :1].expand(4, 4, 4, 5))


def biased(m: Block, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(m, F.linear(x, m.q.weight, x[0, 0]).view(4, 4, 4, 4).transpose(1, 2), k, v)


def cut(m: Block, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(m, m.q(x).view(4, 8, 2, 4).transpose(1, 2), k[:, :2], v[:, :2])


STAYS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "a mask": (masked, {}),
    "causal": (lambda m, x, k, v: attend(m, x, k, v, is_causal=True), {}),
    "a bias": (attend, {"bias": True}),
    "a computed bias": (biased, {}),
    "queries of two attentions": (two, {}),
    "in between": (lambda m, x, k, v: sdpa(m, m.heads(x).relu(), k, v), {}),
    "no linear": (lambda m, x, k, v: sdpa(m, x.view(4, 4, 4, 4).transpose(1, 2), k, v), {}),
    "not transposed": (lambda m, x, k, v: sdpa(m, m.q(x).view(4, 4, 4, 4), k, v), {}),
    "images for heads": (lambda m, x, k, v: sdpa(m, m.heads(x, (0, 1)), k, v), {}),
    "images for rows": (lambda m, x, k, v: sdpa(m, m.heads(x, (0, 2)), k, v), {}),
    "rows for columns": (lambda m, x, k, v: sdpa(m, m.heads(x, (1, 3)), k, v), {}),
    "heads for columns": (lambda m, x, k, v: sdpa(m, m.heads(x, (2, -1)), k, v), {}),
    "transposed twice": (lambda m, x, k, v: sdpa(m, m.heads(x).transpose(1, 2), k, v), {}),
    "rows cut into heads too": (cut, {}),
    "no images": (lambda m, x, k, v: sdpa(m, m.q(x[0]).view(4, 4, 4).transpose(0, 1), k[0], v[0]), {}),
    "keys for all images": (lambda m, x, k, v: attend(m, x, k[:1], v[:1]), {}),
    "wider values": (lambda m, x, k, v: attend(m, x, k, torch.cat([v, v], -1)), {}),
    "in float32": (lambda m, x, k, v: sdpa(m, m.heads(x).float(), k.float(), v.float()), {}),
    **{f"the {which} seen by another": (seen(which), {}) for which in ("linear", "heads", "queries")},
    **{f"the {which} written to": (write(which), {}) for which in ("rows", "keys", "values", "linear", "heads")},
    **{f"the {which} written to": (write(which), {}) for which in ("queries", "result")},
}


@pytest.mark.parametrize("what", STAYS)
def test_what_must_stay(what: str) -> None:
    body, options = STAYS[what]
    traced = traced_as(body, **options)
    assert traced.rewrite(query_attention) == 0 and not traced.launches(kernel)
    assert traced.error() < 1e-2


def test_dropout_stays() -> None:
    traced = traced_as(lambda m, x, k, v: attend(m, x, k, v, dropout_p=0.5))
    assert traced.rewrite(query_attention) == 0 and not traced.launches(kernel)


def test_grouped_queries_stay() -> None:
    if "enable_gqa" not in str(torch.ops.aten.scaled_dot_product_attention.default._schema):
        pytest.skip("this torch has no grouped queries")
    traced = traced_as(lambda m, x, k, v: attend(m, x, k, v, enable_gqa=True))
    assert traced.rewrite(query_attention) == 0 and not traced.launches(kernel)


PLACES: dict[str, Callable[[fx.Node], Any]] = {
    "result": lambda node: node,
    "keys": lambda node: node.args[1],
    "values": lambda node: node.args[2],
    "queries": lambda node: node.args[0],
    "heads": lambda node: node.args[0].args[0],
    "linear": lambda node: node.args[0].args[0].args[0],
    "rows": lambda node: node.args[0].args[0].args[0].args[0],
    "weight": lambda node: node.args[0].args[0].args[0].args[1],
}


@pytest.mark.parametrize("which", PLACES)
def test_what_is_written_to_by_then_stays(which: str) -> None:
    traced = traced_as(attend)
    (node,) = traced.find("scaled_dot_product_attention")
    place = PLACES[which](node)
    place.meta["mutated"] = True
    assert traced.rewrite(query_attention) == 0 and not traced.launches(kernel)
    del place.meta["mutated"]
    assert traced.rewrite(query_attention) == 1


@pytest.mark.parametrize("to", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("which", PLACES)
def test_what_is_of_another_dtype_stays(which: str, to: torch.dtype) -> None:
    traced = traced_as(attend)
    (node,) = traced.find("scaled_dot_product_attention")
    place = PLACES[which](node)
    kept = place.meta["val"]
    place.meta["val"] = kept.to(to)
    assert traced.rewrite(query_attention) == 0 and not traced.launches(kernel)
    place.meta["val"] = kept
    assert traced.rewrite(query_attention) == 1


@pytest.mark.parametrize(("dtype", "triton"), [(torch.float32, True), (HALF, False)], ids=["float32", "no Triton"])
def test_where_it_is_not_there(dtype: torch.dtype, triton: bool) -> None:
    traced = traced_as(attend, dtype, triton)
    assert traced.rewrite(query_attention) == 0 and not traced.launches(kernel)
    assert traced.error() < 1e-2


def test_what_would_not_pay_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def profitable(*sizes: Any) -> bool:
        asked.append(sizes)
        return sizes[2][1] == 3

    monkeypatch.setattr(kernel, "profitable", profitable)
    traced = traced_as(lambda m, x, k, v: (attend(m, x, k, v), attend(m, x.sin(), k[:, :, 2:], v[:, :, 2:])))
    assert traced.rewrite(query_attention) == 1
    assert asked == [(4, 4, (4, 5, 4), 16, CPU), (4, 4, (4, 3, 4), 16, CPU)]
    assert traced.ops()["scaled_dot_product_attention"] == 1
    assert shape(traced.launches(kernel)[0].args[2]) == (4, 4, 3, 4)
    assert traced.error() < 2e-2


@pytest.mark.parametrize("model", ["tiny-sd15", "tiny-sdxl"])
def test_all_attentions_to_the_prompt_of_a_unet(model: str) -> None:
    whole = Whole(model, HALF)
    unet, counts = whole.unet, whole.counts
    blocks = sum(type(module).__name__ == "BasicTransformerBlock" for module in unet.modules())
    assert counts["query_attention"] == counts["attention"] == blocks > 0  # the others are of images to themselves
    assert whole.error() < 1.2 * whole.error_before + 1e-3


def test_the_linears_that_are_fused_and_what_that_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(kernel, "saved", lambda *sizes: asked.append(sizes[:4]) or 2.5)
    on = traced_as(attend)
    (found,) = fused_linears(on.graph, on.ctx).items()
    assert found[1] == 2.5 and found[0].args[1].meta["weight"].path.endswith("q.weight")
    assert asked == [(4, 4, (4, 5, 4), 16)]
    assert on.rewrite(query_attention) == 1 and not fused_linears(on.graph, on.ctx)
    assert not fused_linears(traced_as(attend, bias=True).graph, on.ctx)
