from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, einsum
from torch.nn import functional as F

from sfast_ext.call_signature import flatten_call
from sfast_ext.capture.capture import capture
from sfast_ext.environment import TORCH
from sfast_ext.passes import PassContext, run_passes
from sfast_ext.passes.cleanup import cleanup
from sfast_ext.passes.scaled_dot_product import is_scores_equation, is_values_equation, scaled_dot_product
from sfast_ext.plans.register_machine import Interpreter
from sfast_ext.weights.arena import WeightArena

from . import attentions
from .attentions import WAYS, Layer
from .support import Traced, aten, randn, relative

CPU = torch.device("cpu")
# torch 2.1 multiplies no float16 on a CPU
HALF = torch.float16 if TORCH >= (2, 2) else torch.bfloat16
ROUNDING = {torch.float16: 4e-3, torch.bfloat16: 3e-2}[HALF]
Q, K, V = randn(3, 13, 6), randn(3, 9, 6) * 2, randn(3, 9, 5)


class Plan:
    """A layer's forward after all passes."""

    def __init__(self, attend: Callable[..., Tensor], dtype: torch.dtype = HALF, triton: bool = True) -> None:
        torch.manual_seed(0)
        self.layer = Layer(attend).to(dtype)
        inputs = torch.randn(2, 13, 24).to(dtype), torch.randn(2, 9, 10).to(dtype)
        self.inputs = list(inputs)
        with torch.no_grad():
            self.expected = self.layer(*inputs)
        arena = WeightArena(self.layer)
        self.gm = capture(self.layer.forward, flatten_call(inputs, {}, CPU), self.inputs, arena).graph_module
        self.counts = run_passes(self.gm, PassContext(arena, CPU, triton=triton))
        self.gm.graph.lint()

    def operations(self) -> list[str]:
        """What it does, by function, the results' shape and dtype and what is no node among the arguments."""
        return sorted(
            f"{node.target} {getattr(node.target, '__module__', '')} {described(node)}"
            for node in self.gm.graph.nodes
            if node.op == "call_function"
        )

    def run(self) -> Tensor:
        with torch.no_grad():
            return Interpreter(self.gm)(*self.inputs)[0]


def described(node: Any) -> str:
    val = node.meta["val"]
    args = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: "node")
    return f"{val.dtype} {tuple(val.shape)} {args}" if isinstance(val, Tensor) else str(args)


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_plan_of_sdpa(way: str, triton: bool) -> None:
    ours, wanted = Plan(WAYS[way], triton=triton), Plan(attentions.sdpa, triton=triton)
    assert ours.operations() == wanted.operations()
    # to_k and to_v are one linear, whatever the keys were multiplied by
    assert ours.counts["packed_linear"] == wanted.counts["packed_linear"] == 1
    assert relative(ours.run(), ours.expected) < ROUNDING


def test_upcast_attention_stays_in_float() -> None:
    ours, wanted = Plan(attentions.in_float), Plan(attentions.sdpa_in_float)
    (node,) = [n for n in ours.gm.graph.nodes if "attention" in getattr(n.target, "__module__", "")]
    assert node.meta["val"].dtype == torch.float32
    assert [op for op in ours.operations() if "attention" in op] == [
        op for op in wanted.operations() if "attention" in op
    ]
    assert relative(ours.run(), ours.expected) < ROUNDING / 4


def scores(q: Tensor, k: Tensor) -> Tensor:
    return einsum("b i d, b j d -> b i j", q, k)


TAKEN: dict[str, tuple[Callable[..., Any], Any]] = {
    "scale of its own": (lambda q, k, v: torch.softmax(q @ k.mT * 0.3, -1) @ v, 0.3),
    "divided": (lambda q, k, v: torch.softmax(q @ k.mT / 4.0, -1) @ v, 0.25),
    "no scale": (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, 1.0),
    "the usual scale": (lambda q, k, v: torch.softmax(q @ k.mT * 6**-0.5, -1) @ v, None),
    "scaled twice": (lambda q, k, v: torch.softmax((q @ k.mT * 0.5) * 0.5, 2) @ v, 0.25),
    "the last of three dimensions": (lambda q, k, v: F.softmax(scores(q, k), dim=2) @ v, 1.0),
    "keys that lie the other way": (lambda q, k, v: torch.softmax(torch.bmm(q, k.mT.contiguous()), -1) @ v, 1.0),
    "a mask": (lambda q, k, v: torch.softmax(q @ k.mT * 0.5 + k[:, None, :, 0], -1) @ v, 0.5),
    "a mask by baddbmm": (
        lambda q, k, v: torch.softmax(torch.baddbmm(k[:, None, :, 0], q, k.mT, alpha=0.5), -1) @ v, 0.5
    ),
    "values on the left": (lambda q, k, v: torch.bmm(v.mT, torch.softmax(q @ k.mT * 0.5, -1).transpose(1, 2)), 0.5),
    "values on the left, keys that lie the other way": (
        lambda q, k, v: torch.bmm(v.mT.contiguous(), torch.softmax(q @ k.mT.contiguous(), -1).permute(0, 2, 1)), 1.0
    ),
    "other names": (
        lambda q, k, v: einsum("nqk,nkc->nqc", einsum("nqc,nkc->nqk", q, k).softmax(-1), v), 1.0
    ),
    "probabilities in double": (lambda q, k, v: (q @ k.mT).softmax(-1, torch.float64).float() @ v, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("what", TAKEN)
def test_goes(what: str) -> None:
    forward, scale = TAKEN[what]
    traced = Traced(forward, Q, K, V)
    assert traced.rewrite(cleanup, scaled_dot_product) == 1
    (node,) = traced.find("scaled_dot_product_attention")
    assert node.kwargs.get("scale") == (None if scale is None else pytest.approx(scale))
    assert traced.ops()["softmax"] == 0
    assert traced.error() < 1e-5


LEFT: dict[str, Callable[..., Any]] = {
    "scores used elsewhere": lambda q, k, v: (torch.softmax(s := q @ k.mT, -1) @ v, s),
    "probabilities used elsewhere": lambda q, k, v: ((p := torch.softmax(q @ k.mT, -1)) @ v, p),
    "over the queries": lambda q, k, v: torch.softmax(q @ k.mT, 1) @ v,
    "a mask that is scaled with the scores": lambda q, k, v: torch.softmax((q @ k.mT + k[:, None, :, 0]) * 0.5, -1) @ v,
    "two masks": lambda q, k, v: torch.softmax(q @ k.mT + k[:, None, :, 0] + k[:, None, :, 1], -1) @ v,
    "scores without a matmul": lambda q, k, v: torch.softmax(q[:, :, :1] * k[:, None, :, 0], -1) @ v,
    "scores to a power": lambda q, k, v: torch.softmax((q @ k.mT) ** 3, -1) @ v,
    "scaled by a tensor": lambda q, k, v: torch.softmax((q @ k.mT) * q[:, :1, :1], -1) @ v,
    "masked away": lambda q, k, v: torch.softmax((q @ k.mT).masked_fill(k[:, None, :, 0] > 0, -1e4), -1) @ v,
    "dropped in part": lambda q, k, v: torch.softmax(q @ k.mT, -1)[:, :, :4] @ v[:, :4],
    "values on the left of probabilities as they are": lambda q, k, v: torch.bmm(q.mT, torch.softmax(q @ k.mT, -1)),
    "values on the left, one set for all": lambda q, k, v: torch.matmul(
        v[0].mT, torch.softmax(q @ k.mT, -1).transpose(1, 2)
    ),
    "values on the left, turned probabilities used elsewhere": lambda q, k, v: (
        torch.bmm(v.mT, p := torch.softmax(q @ k.mT, -1).transpose(1, 2)),
        p,
    ),
    "one set of keys for all": lambda q, k, v: torch.softmax(q @ k[0].mT, -1) @ v,
    "other contraction": lambda q, k, v: einsum("bij,bjd->bjd", (q @ k.mT).softmax(-1)[:, :9], v),
    "written to afterwards": lambda q, k, v: (torch.softmax(q @ k.mT, -1).mul_(2)) @ v,
    "no matrix": lambda q, k, v: torch.softmax(q @ k.mT, -1) * v.sum(),
}


@pytest.mark.parametrize("what", LEFT)
def test_left_alone(what: str) -> None:
    traced = Traced(LEFT[what], Q, K, V)
    assert traced.rewrite(cleanup, scaled_dot_product) == 0
    assert traced.ops()["scaled_dot_product_attention"] == 0
    assert traced.error() < 1e-6


def test_queries_and_keys_in_float_for_the_scores_alone() -> None:
    """diffusers' `upcast_attention`: SDPA takes one dtype, so it is the wider."""
    traced = Traced(
        lambda q, k, v: torch.bmm((q.float() @ k.float().mT * 0.2).softmax(-1).to(HALF), v),
        *(x.to(HALF) for x in (Q, K, V)),
    )
    assert traced.rewrite(cleanup, scaled_dot_product) == 1
    (node,) = traced.find("scaled_dot_product_attention")
    assert [x.meta["val"].dtype for x in node.args[:3]] == [torch.float32] * 3
    assert traced.outputs()[0].dtype == HALF
    assert traced.error() < ROUNDING / 2


def test_a_mask_that_forbids_a_whole_row() -> None:
    mask = torch.zeros(13, 9)
    mask[:, 4:] = -torch.inf
    traced = Traced(lambda q, k, v, m: torch.softmax(q @ k.mT + m, -1) @ v, Q, K, V, mask)
    assert traced.rewrite(cleanup, scaled_dot_product) == 1
    assert traced.error() < 1e-5


@pytest.mark.parametrize(
    ("equation", "scores", "values"),
    [
        ("b i d, b j d -> b i j", True, False),
        ("b i j, b j d -> b i d", False, True),
        ("bhid,bhjd->bhij", True, False),
        ("bhij,bhjd->bhid", False, True),
        ("b i d, b j d -> b j i", False, False),
        ("b i d, b d j -> b i j", False, True),
        ("b i d, c j d -> b i j", False, False),
        ("...id,...jd->...ij", False, False),
        ("b i i, b i i -> b i i", False, False),
        ("bid,bjd", False, False),
    ],
)
def test_equations(equation: str, scores: bool, values: bool) -> None:
    assert is_scores_equation(equation) == scores
    assert is_values_equation(equation) == values


def test_what_einsum_calls_products_are() -> None:
    """The equations are told by their letters alone: einsum itself must agree."""
    q, k, v = Q.double(), K.double(), V.double()
    assert torch.equal(einsum("b i d, b j d -> b i j", q, k), torch.einsum("bid,bjd->bij", q, k))
    p = (q @ k.mT).softmax(-1)
    torch.testing.assert_close(einsum("b i d, b d j -> b i j", p, v), p @ v)
    assert aten.einsum.default is not None
