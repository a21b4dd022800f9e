"""All passes over the real code of the models, and what they must leave."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sfast_ext.call_signature import flatten_call
from sfast_ext.capture.capture import capture
from sfast_ext.passes import PassContext, run_passes
from sfast_ext.passes.rewrite import CONV, is_cast, is_kernel, is_op
from sfast_ext.plans.register_machine import Interpreter
from sfast_ext.weights.arena import WeightArena

from .networks import NETWORKS, network
from .support import aten, name, relative

CPU = torch.device("cpu")


class Rewritten:
    def __init__(self, kind: str, autocast: bool = False, rewrite: bool = True) -> None:
        self.module, self.args, self.kwargs = network(kind)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            self.expected = self.original()
            self.arena = WeightArena(self.module)
            call = flatten_call(self.args, self.kwargs, CPU)
            self.inputs = call.tensors(CPU)
            self.gm = capture(self.module.forward, call, self.inputs, self.arena).graph_module
        self.before = self.ops()
        self.counts = run_passes(self.gm, PassContext(self.arena, CPU, triton=True)) if rewrite else {}
        self.gm.graph.lint()

    def original(self) -> torch.Tensor:
        with torch.no_grad():
            result = self.module(*self.args, **self.kwargs)
        return result if isinstance(result, torch.Tensor) else result[0]

    def ops(self) -> Counter[str]:
        return Counter(name(node) for node in self.gm.graph.nodes if node.op == "call_function")

    def run(self) -> torch.Tensor:
        with torch.no_grad():
            return Interpreter(self.gm)(*self.inputs)[0]


@functools.lru_cache(maxsize=None)
def whole(kind: str) -> Rewritten:
    """One for all tests, which leave it as it is."""
    return Rewritten(kind)


@pytest.fixture(scope="module", params=NETWORKS)
def rewritten(request: pytest.FixtureRequest) -> Rewritten:
    return whole(request.param)


def modules(module: nn.Module, *kinds: str) -> list[nn.Module]:
    names = {cls.__name__: cls for m in module.modules() for cls in type(m).__mro__}
    return [m for m in module.modules() if any(isinstance(m, names[kind]) for kind in kinds if kind in names)]


@pytest.mark.long(but=[0, 2, 3, 5])
def test_same_output(rewritten: Rewritten) -> None:
    assert relative(rewritten.run(), rewritten.expected) < 1e-5


def test_everything_was_found(rewritten: Rewritten) -> None:
    module, counts, left = rewritten.module, rewritten.counts, rewritten.ops()
    blocks = modules(module, "ResnetBlock2D", "ResBlock")
    transformers = modules(module, "BasicTransformerBlock")
    assert counts["group_norm"] == len(modules(module, "GroupNorm"))
    assert counts["layer_norm"] + counts["add_layer_norm"] == len(modules(module, "LayerNorm"))
    # attention 1 and the feed-forward of each block have a residual before their norm
    assert counts["add_layer_norm"] >= 2 * len(transformers)
    assert counts["geglu"] == len(transformers)
    assert counts["channels_last"] == len(modules(module, "Conv2d"))
    # the blocks' last convolutions with their residuals, and all other convolutions that no norm takes the bias of
    assert counts["bias_add"] > len(blocks)
    # of ldm's each is written out
    assert counts["attention"] == 2 * len(transformers)
    targets = {node.target for node in rewritten.gm.graph.nodes}
    gone = (aten.group_norm, aten.layer_norm, aten.gelu, aten.chunk, aten.dropout, aten.clone, aten.view)
    assert not targets & {op.default for op in gone}
    assert left["contiguous"] == 1  # the latent, once


def test_siblings_are_packed(rewritten: Rewritten) -> None:
    transformers = modules(rewritten.module, "BasicTransformerBlock")
    # Q, K, V of each self-attention; keys and values over the prompt; the time projections
    assert rewritten.counts["packed_linear"] == len(transformers) + 2
    inputs: Counter[fx.Node] = Counter()
    for node in rewritten.gm.graph.nodes:
        if is_op(node, (aten.linear.default,)):
            inputs[node.args[0]] += 1
    assert set(inputs.values()) == {1}


def test_time_is_folded_into_the_norms(rewritten: Rewritten) -> None:
    blocks = modules(rewritten.module, "ResnetBlock2D", "ResBlock")
    shifted = [node for node in rewritten.gm.graph.nodes if node.kwargs.get("shift") is not None and is_norm(node)]
    assert len(shifted) == len(blocks)
    # each shift is a slice of one sum, of all time projections and the biases of the convolutions before
    assert len({node.kwargs["shift"].args[0] for node in shifted}) == 1
    assert all(node.args[0].args[2] is None for node in shifted)


def is_norm(node: fx.Node) -> bool:
    return node.op == "call_function" and name(node) == "group_norm"


def test_images_stay_channels_last(rewritten: Rewritten) -> None:
    walker = Walk(rewritten.gm)
    with torch.no_grad():
        walker.run(*rewritten.inputs)
    assert walker.convolutions > 10
    assert walker.copies == []


def test_images_do_not_without_the_passes() -> None:
    """Else the test above would find nothing whatever happens."""
    untouched = Rewritten("sd15", rewrite=False)
    walker = Walk(untouched.gm)
    with torch.no_grad():
        walker.run(*untouched.inputs)
    assert len(walker.copies) > 10


def test_weights_are_read_live(rewritten: Rewritten) -> None:
    """A change of the parameters, in place, changes the output as it changes the module's."""
    before = {name: value.clone() for name, value in rewritten.module.state_dict().items()}
    with torch.no_grad():
        for parameter in rewritten.module.parameters():
            parameter.mul_(1.1).add_(0.01)
    expected = rewritten.original()
    assert relative(expected, rewritten.expected) > 1e-2
    assert relative(rewritten.run(), expected) < 1e-5
    rewritten.module.load_state_dict(before)


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("kind", ["sd15", "ldm"])
def test_autocast(kind: str) -> None:
    """The casts that autocast puts around norms go into the kernels; the error stays that of bfloat16."""
    exact, half = whole(kind), Rewritten(kind, autocast=True)
    assert half.counts["group_norm"] == exact.counts["group_norm"]
    assert half.counts["packed_linear"] == exact.counts["packed_linear"]
    assert half.counts["layer_norm"] + half.counts["add_layer_norm"] == len(modules(half.module, "LayerNorm"))
    assert relative(half.run(), exact.expected) < 1.2 * relative(half.expected, exact.expected) + 1e-3
    casts = [node for node in half.gm.graph.nodes if is_cast(node)]
    norms = [node for node in half.gm.graph.nodes if node.op == "call_function" and "norm" in name(node)]
    # of a linear whose sum is normed the bias is an operand too, and is cast as the linear is
    biases = {node.args[1] for node in norms if name(node) in ("add_group_norm", "cat_group_norm")}
    biases |= {node.kwargs.get("shift") for node in norms}
    assert not set(casts) & ({x for node in norms for x in [*node.all_input_nodes, *node.users]} - biases)


class Walk(fx.Interpreter):
    """Runs the graph and notes what copies an image, or is given one that does not lie in NHWC."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.copies: list[str] = []
        self.convolutions = 0

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        images = [self.env[x] for x in n.all_input_nodes if x.op != "get_attr"]
        if is_op(n, CONV) or (is_kernel(n.target) and name(n) != "attention"):
            self.convolutions += is_op(n, CONV)
            for x in images:
                layout = torch.channels_last if x.dim() == 4 else torch.contiguous_format
                if x.dim() > 2 and not x.is_contiguous(memory_format=layout):
                    self.copies.append(f"{n.format_node()} is given {x.stride()}")
            return super().run_node(n)
        with Copies() as copies:
            result = super().run_node(n)
        meant = n.target in (aten.contiguous.default, aten.to.dtype)
        if copies.seen and not meant and not near(n, "attention", "einsum"):
            self.copies.append(f"{n.format_node()} copies {copies.seen}")
        return result


def near(node: fx.Node, *kernels: str) -> bool:
    """Heads are taken apart before an attention and put together after it: copies that near are its own."""
    before, after = {node}, {node}
    for _ in range(3):
        before |= {x for n in before for x in n.all_input_nodes if x.op == "call_function"}
        after |= {x for n in after for x in n.users if x.op == "call_function"}
    return any(name(x) in kernels for x in before | after)


class Copies(TorchDispatchMode):
    def __enter__(self) -> Copies:
        self.seen: list[str] = []
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (
            aten.clone.default,
            aten.copy_.default,
            aten._to_copy.default,
            aten._reshape_copy.default,
        ):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))
