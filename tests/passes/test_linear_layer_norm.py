from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from sfast_ext.kernels.linear import linear_layer_norm as kernel
from sfast_ext.passes.channels_last import channels_last
from sfast_ext.passes.cleanup import cleanup
from sfast_ext.passes.layer_norm import add_layer_norm, layer_norm
from sfast_ext.passes.linear_accumulate import linear_accumulate
from sfast_ext.passes.linear_layer_norm import linear_layer_norm
from sfast_ext.passes.rewrite import is_weight, shape

from .support import Traced, Whole, name, randn

CPU = torch.device("cpu")
HALF = torch.bfloat16
X = randn(2, 6, 16).to(HALF)
IMAGE = randn(2, 16, 2, 3).to(HALF).to(memory_format=torch.channels_last)
BEFORE = add_layer_norm, layer_norm, linear_accumulate
NARROW, OTHER = kernel.Tile(64, 8, 0.0, 0.0), kernel.Tile(128, 16, 0.0, 0.0, pair=2)


@pytest.fixture(autouse=True)
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel, also if it would not pay, in tiles that there are none of; long sums by those of another kind."""
    monkeypatch.setattr(kernel, "profitable", lambda m, n, k, device: True)
    monkeypatch.setattr(kernel, "best", lambda m, n, k, device: OTHER if k > 100 else NARROW)


class Block(nn.Module):
    def __init__(self, body: Callable[..., Any], bias: bool = True, affine: bool = True) -> None:
        super().__init__()
        self.proj, self.first, self.second, self.last = (nn.Linear(16, 16, bias=bias) for _ in range(4))
        self.conv = nn.Conv2d(16, 16, 1, bias=bias)
        self.up, self.down, self.wide = nn.Linear(16, 128), nn.Linear(128, 16, bias=bias), nn.Linear(16, 24, bias=bias)
        self.norm, self.norm2, self.norm3 = (nn.LayerNorm(16, eps=1e-3, elementwise_affine=affine) for _ in range(3))
        self.wide_norm = nn.LayerNorm(24)
        for norm in (self.norm, self.norm2, self.norm3) if affine else ():
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        self.body = body

    def forward(self, *inputs: Tensor) -> Any:
        return self.body(self, *inputs)

    def block(self, y: Tensor) -> Tensor:
        """Of a transformer, without its attention."""
        y = self.first(self.norm(y).sin()) + y
        y = self.second(self.norm2(y).cos()) + y
        return self.down(self.up(self.norm3(y)).relu()) + y

    def of_tokens(self, x: Tensor) -> Tensor:
        return self.proj(self.block(self.proj(x)))

    def of_an_image(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = self.block(self.conv(x).permute(0, 2, 3, 1).reshape(n, h * w, c))
        return self.conv(y.reshape(n, h, w, c).permute(0, 3, 1, 2)) + x


def traced_until(body: Callable[..., Any], x: Tensor = X, triton: bool = True, **options: Any) -> Traced:
    """All but the pass itself."""
    traced = Traced(Block(body, **options).to(x.dtype), x)
    traced.ctx.triton = triton
    traced.rewrite(*BEFORE)
    return traced


def rewritten(body: Callable[..., Any], x: Tensor = X, triton: bool = True, **options: Any) -> tuple[Traced, int]:
    traced = traced_until(body, x, triton, **options)
    return traced, traced.rewrite(linear_layer_norm)


BARE, PLAIN = {"bias": False}, {"affine": False}
SUMMED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "kept": (lambda m, x: (m.norm(y := m.first(x.sin()) + x), y), {}),
    "only normed": (lambda m, x: m.norm(m.first(x.sin()) + x), {}),
    "the other way round": (lambda m, x: (m.norm(y := x + m.first(x.sin())), y), {}),
    "no bias": (lambda m, x: (m.norm(y := m.first(x.sin()) + x), y), BARE),
    "no weights": (lambda m, x: (m.norm(y := m.first(x.sin()) + x), y), PLAIN),
    "two dimensions": (lambda m, x: (m.norm(y := m.first(x[0].sin()) + x[1]), y), {}),
    "two linears": (lambda m, x: (m.norm(y := m.first(x.sin()) + m.second(x)), y), {}),
    "its own rows": (lambda m, x: (m.norm(y := m.first(x) + x), y), {}),
    "used before it is normed": (lambda m, x: (z := (y := m.first(x) + x).sin(), m.norm(y) * z, y), {}),
    "another linear": (lambda m, x: (m.norm(y := m.down(m.up(x)) + x), y), {}),
}


@pytest.mark.parametrize("what", SUMMED)
def test_the_norm_of_a_sum_goes_into_the_linear(what: str) -> None:
    body, options = SUMMED[what]
    traced = traced_until(body, **options)
    before, (norm,) = traced.outputs(), traced.find("add_layer_norm")
    linear, residual, factor, offset, eps = norm.args
    assert isinstance(linear, fx.Node)
    shift, users = norm.kwargs["shift"], list(norm.users)
    rows, weight = linear.args[:2]
    assert traced.rewrite(linear_layer_norm) == 1
    (node,) = traced.launches(kernel)
    assert node.args[:-1] == (rows, weight, shift, residual, factor, offset, eps, None)
    assert list(node.users) == users and is_weight(weight)
    assert (shift is None) == (options is BARE) and (factor is None) == (options is PLAIN)
    assert [shape(user) for user in users] == [node.meta["val"][user.args[1]].shape for user in users]
    assert traced.ops()["add_layer_norm"] == 0 and linear._erased
    assert traced.error() < 1e-2
    assert all(torch.equal(a, b) for a, b in zip(traced.outputs(), before, strict=True))


def moved(m: Block, x: Tensor) -> Any:
    y = m.first(x).reshape(12, 16)
    return m.norm(y), y.sin()


def an_image(m: Block, x: Tensor) -> Any:
    y = m.proj(x.reshape(2, 2, 3, 16)).reshape(2, 6, 16)
    z = m.norm(y).cos()
    return z + y


ALONE: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "kept": (lambda m, x: (m.norm(y := m.first(x.sin())), y), {}),
    "only normed": (lambda m, x: m.norm(m.first(x.sin())), {}),
    "used thrice": (lambda m, x: (m.norm(y := m.first(x.sin())), y.sin(), y.cos()), {}),
    "no bias": (lambda m, x: (m.norm(y := m.first(x.sin())), y), BARE),
    "no weights": (lambda m, x: (m.norm(y := m.first(x.sin())), y), PLAIN),
    "under a reshape": (moved, {}),
    "of an image": (an_image, {}),
    "used before it is normed": (lambda m, x: (z := (y := m.first(x)).sin(), m.norm(y) * z, y), {}),
    "a weight that others made late": (lambda m, x: (y := m.first(x), F.layer_norm(y, (16,), m.norm2.weight)), {}),
}


@pytest.mark.parametrize("what", ALONE)
def test_so_does_a_norm_of_the_linear_alone(what: str) -> None:
    body, options = ALONE[what]
    traced = traced_until(body, **options)
    before, (norm,) = traced.outputs(), traced.find("layer_norm")
    (linear,) = traced.find("linear")
    weight, bias = linear.args[1], linear.args[2] if len(linear.args) > 2 else None
    affine = norm.args[1:]
    assert traced.rewrite(linear_layer_norm) == 1
    (node,) = traced.launches(kernel)
    assert node.args[1:-1] == (weight, bias, None, *affine, None)
    assert (bias is None) == (options is BARE) and (affine[0] is None) == (options is PLAIN)
    parts = {user.args[1]: user for user in node.users}
    assert all(shape(user) == node.meta["val"][i].shape for i, user in parts.items())
    assert traced.ops()["layer_norm"] == traced.ops()["linear"] == 0
    assert traced.error() < 1e-2
    assert all(torch.equal(a, b) for a, b in zip(traced.outputs(), before, strict=True))


def test_a_block_of_a_transformer() -> None:
    """Each norm's sum is the next residual, and the last has the bias of the linear that is added to it."""
    traced, count = rewritten(Block.of_tokens)
    one, two, three = traced.launches(kernel)
    assert count == 3
    onto = traced.find("linear_accumulate")
    sums = [next(user for user in node.users if user.args[1] == 0) for node in (one, two, three)]
    assert one.args[3] is None and [two.args[3], three.args[3]] == sums[:2]
    assert onto[0].args[2] is sums[2]
    assert one.args[7] is two.args[7] is None and is_weight(three.args[7])
    assert traced.ops()["add_layer_norm"] == traced.ops()["layer_norm"] == traced.ops()["add"] == 0
    assert traced.error() < 2e-2


def test_one_of_an_image() -> None:
    traced = Traced(Block(Block.of_an_image).to(HALF), IMAGE)
    traced.ctx.triton = True
    assert traced.rewrite(channels_last, cleanup, *BEFORE, linear_layer_norm) == 3
    first = traced.launches(kernel)[0]
    assert first.args[3] is None and len(first.users) == 2
    assert traced.ops()["add_layer_norm"] == traced.ops()["layer_norm"] == 0
    assert traced.error() < 2e-2


def test_linears_that_follow_each_other_share_their_records() -> None:
    def body(m: Block, x: Tensor) -> Any:
        y = m.block(m.proj(x))  # three of one kind
        z = m.norm(m.down(m.up(y)) + y)  # other tiles
        return z, m.wide_norm(m.wide(z)), m.norm2(m.second(z[0]) + z[1])  # another N, another M

    traced, count = rewritten(body)
    assert count == 6
    (zeros,) = traced.find("zeros")
    assert next(node for node in traced.graph.nodes if node.op == "call_function") is zeros
    assert zeros.kwargs == {"dtype": torch.int64, "device": CPU} and shape(zeros) == tuple(zeros.args[0])
    needed: dict[fx.Node, int] = {}
    for node in traced.launches(kernel):
        x, weight, records = node.args[0], node.args[1], node.args[8]
        assert isinstance(records, fx.Node) and records.args[:2] == (zeros, 0)
        rows, (n, k) = shape(x)[:-1], shape(weight)
        count = kernel.record_count(rows[0] if len(rows) == 1 else rows[0] * rows[1], n, k, CPU)
        assert needed.setdefault(records, count) == count > 0
    kinds = [node.args[8] for node in traced.launches(kernel)]
    assert kinds[0] is kinds[1] is kinds[2] and len(set(kinds)) == len(needed) == 4
    # next to each other, and all of them
    ends = sorted(records.args[2:] for records in needed)
    assert [begin for begin, _ in ends] == [0, *(end for _, end in ends[:-1])] and ends[-1][1] == shape(zeros)[0]
    assert all(records.args[3] - records.args[2] == count for records, count in needed.items())
    assert all(records.meta["val"].dtype == torch.int64 for records in needed)
    assert traced.error() < 2e-2


TWICE: dict[str, Callable[..., Any]] = {
    "two norms of a sum": lambda m, x: (m.norm(y := m.first(x) + x), m.norm2(y)),
    "two norms": lambda m, x: (m.norm(y := m.first(x)), m.norm2(y)),
    "two norms of a moved one": lambda m, x: (m.norm(y := m.first(x).reshape(12, 16)), m.norm2(y)),
    "a norm, and one of a sum with it": lambda m, x: (m.norm(y := m.first(x)), m.norm2(m.second(x) + y)),
}


@pytest.mark.parametrize("what", TWICE)
def test_a_linear_that_two_norms_see(what: str) -> None:
    traced, count = rewritten(TWICE[what])
    assert count == len(traced.launches(kernel)) == (2 if "with it" in what else 1)
    assert traced.error() < 1e-2


def write(which: str) -> Callable[..., Any]:
    def body(m: Block, x: Tensor) -> Any:
        rows, residual = x.sin(), x.cos()
        linear = m.first(rows)
        total = linear + residual
        normed = m.norm(total)
        {"rows": rows, "residual": residual, "linear": linear, "sum": total, "norm": normed}[which].mul_(2)
        return normed, total

    return body


STAYS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "a summand seen by another": (lambda m, x: (m.norm(y := (c := m.first(x)) + x), y, c), {}),
    "with itself": (lambda m, x: m.norm((c := m.first(x)) + c), BARE),
    "no linear": (lambda m, x: (m.norm(x.sin()), m.norm2(x.sin() + x)), {}),
    "a matmul of activations": (lambda m, x: m.norm(x @ x.transpose(1, 2) @ x), {}),
    "in between": (lambda m, x: m.norm(m.first(x).relu()), {}),
    "other rows": (lambda m, x: m.norm(m.wide(x[:, :4]).reshape(2, 6, 16)), {}),
    "a reshape and another": (lambda m, x: (m.norm((c := m.first(x)).reshape(12, 16)), c), {}),
    "transposed": (lambda m, x: m.norm(m.first(x).transpose(0, 1)), {}),
    "in float32": (lambda m, x: F.layer_norm(m.first(x).float(), (16,)), {}),
    "a sum in float32": (lambda m, x: F.layer_norm((m.first(x) + x).float(), (16,)), {}),
    "a residual in float32": (lambda m, x: F.layer_norm(m.first(x) + x.float(), (16,)), {}),
    "a residual for all rows": (lambda m, x: m.norm(m.first(x) + x[:1, :1]), {}),
    "a factor": (lambda m, x: m.norm(torch.add(m.first(x), x, alpha=2)), {}),
    "computed weights": (lambda m, x: F.layer_norm(m.first(x), (16,), m.norm.weight * 2, m.norm.bias), {}),
    "computed offsets": (lambda m, x: (b := x[0, 0] * 2, F.layer_norm(m.first(x) + x, (16,), None, b)), {}),
    "a computed bias": (lambda m, x: m.norm(F.linear(x, m.first.weight, x[0, 0])), {}),
    "a computed bias in a sum": (lambda m, x: m.norm(F.linear(x, m.first.weight, x[0, 0]) + x), {}),
    "the rows are written to": (write("rows"), {}),
    "the residual is written to": (write("residual"), {}),
    "the linear is written to": (write("linear"), {}),
    "the sum is written to": (write("sum"), {}),
    "the norm is written to": (write("norm"), {}),
}


@pytest.mark.parametrize("what", STAYS)
def test_what_must_stay(what: str) -> None:
    body, options = STAYS[what]
    traced, count = rewritten(body, **options)
    assert count == 0 and not traced.launches(kernel)
    assert traced.ops()["zeros"] == 0
    assert traced.error() < 1e-2


_WRITTEN = ["linear", "norm", "rows", "bias", "factor"]


@pytest.mark.parametrize(
    ("added", "what"), [(False, what) for what in _WRITTEN] + [(True, what) for what in [*_WRITTEN, "residual"]]
)
def test_what_is_written_to_by_then_stays(added: bool, what: str) -> None:
    traced = traced_until(lambda m, x: m.norm(m.first(x.sin()) + x.cos()) if added else m.norm(m.first(x.sin())))
    (norm,) = traced.find("add_layer_norm" if added else "layer_norm")
    linear = norm.args[0]
    assert isinstance(linear, fx.Node)
    bias = norm.kwargs["shift"] if added else linear.args[2]
    places = {"linear": linear, "norm": norm, "rows": linear.args[0], "bias": bias, "factor": norm.args[1 + added]}
    node = norm.args[1] if what == "residual" else places[what]
    assert isinstance(node, fx.Node)
    node.meta["mutated"] = True
    assert traced.rewrite(linear_layer_norm) == 0 and not traced.launches(kernel)
    del node.meta["mutated"]
    assert traced.rewrite(linear_layer_norm) == 1


@pytest.mark.parametrize("body", [SUMMED["kept"][0], ALONE["kept"][0]], ids=["sum", "alone"])
@pytest.mark.parametrize(("x", "triton"), [(X.float(), True), (X, False)], ids=["float32", "no Triton"])
def test_where_it_is_not_there(x: Tensor, triton: bool, body: Callable[..., Any]) -> None:
    traced, count = rewritten(body, x, triton)
    assert count == 0 and not traced.launches(kernel)
    assert traced.error() < 1e-2


@pytest.mark.parametrize("body", [SUMMED["kept"][0], ALONE["kept"][0]], ids=["sum", "alone"])
def test_no_triton_any_more(body: Callable[..., Any]) -> None:
    traced = traced_until(body)
    traced.ctx.triton = False
    assert traced.rewrite(linear_layer_norm) == 0


@pytest.mark.parametrize("body", [SUMMED["kept"][0], ALONE["kept"][0]], ids=["sum", "alone"])
def test_weights_in_float32_stay(body: Callable[..., Any]) -> None:
    block = Block(body).to(HALF)
    block.norm.float()
    traced = Traced(block, X)
    traced.ctx.triton = True
    assert traced.rewrite(*BEFORE, linear_layer_norm) == 0
    assert sum(traced.ops()[name] for name in ("add_layer_norm", "layer_norm")) == 1
    assert traced.error() < 1e-2


def test_what_would_not_pay_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def profitable(*sizes: Any) -> bool:
        asked.append(sizes)
        return sizes[2] == 128

    monkeypatch.setattr(kernel, "profitable", profitable)
    traced, count = rewritten(lambda m, x: m.norm(m.down(m.up(m.norm2(m.first(x) + x))) + x))
    assert asked == [(12, 16, 16, CPU), (12, 16, 128, CPU)]
    assert count == 1 and traced.ops()["add_layer_norm"] == 1
    assert traced.error() < 1e-2
    monkeypatch.setattr(kernel, "profitable", lambda *sizes: False)
    traced, count = rewritten(Block.of_tokens)
    assert count == 0 and traced.ops()["zeros"] == 0


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("model", ["tiny-sd15", "tiny-sdxl"])
def test_all_norms_of_a_unet(model: str) -> None:
    whole = Whole(model, HALF)
    unet, gm, counts = whole.unet, whole.gm, whole.counts
    launched = [node for node in gm.graph.nodes if node.target is kernel.launch]
    norms = sum(isinstance(module, nn.LayerNorm) for module in unet.modules())
    assert counts["linear_layer_norm"] == len(launched) == norms >= 30
    left = {name(node) for node in gm.graph.nodes if node.op == "call_function"}
    assert not left & {"add_layer_norm", "layer_norm"}
    blocks = sum(type(module).__name__ == "Transformer2DModel" for module in unet.modules())
    assert sum(node.args[3] is None for node in launched) == blocks  # what goes into them
    assert sum(node.args[7] is not None for node in launched) == blocks == counts["linear_accumulate"]  # and out
    assert whole.error() < 1.2 * whole.error_before + 1e-3
