"""The stand-ins of attention libraries, for the tests that import them; other tests do not see them. And a layer around
an attention, with what a capture makes of it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from capture.test_block_reuse import described
from torch import Tensor, fx, nn
from torch.nn import functional as F

from sfast_ext.call_signature import flatten_call
from sfast_ext.capture import live_trace
from sfast_ext.capture.capture import Captured, CaptureRefused, capture
from sfast_ext.capture.fake_trace import record
from sfast_ext.capture.live_trace import LiveTrace
from sfast_ext.weights.arena import WeightArena

CPU = torch.device("cpu")
HEADS, WIDTH = 3, 8
X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
live = pytest.mark.skipif(not live_trace.SUPPORTED, reason="an older torch keeps its modes in another way")

HERE = Path(__file__).parent
HOMES = {
    "xformers": HERE / "xformers_standin",
    "flash_attn": HERE / "attention_standins",
    "sageattention": HERE / "attention_standins",
}
# they look for xformers when they are imported: what they find is not to depend on which test came first
SEEKERS = ("ldm.modules.diffusionmodules.openaimodel", "diffusers.models.attention_processor")
# a module that registers operators is imported once in a process
_loaded: dict[str, dict[str, ModuleType]] = {}


def takes_its_place(name: str) -> bool:
    """Whether a stand-in can be imported. Torch takes the operators of a library once: not if it is installed."""
    return name in _loaded or importlib.util.find_spec(name) is None


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """An installed library that nothing has imported yet is not found within, so that its stand-in can be."""
    found = sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        if found is None:
            sys.modules.pop(name, None)


@contextmanager
def imported(name: str, *parts: str) -> Iterator[ModuleType]:
    """A stand-in and some of its submodules, in sys.modules within."""

    def its_own() -> dict[str, ModuleType]:
        return {key: module for key, module in sys.modules.items() if key.partition(".")[0] == name}

    for seeker in SEEKERS:
        with suppress(ImportError):
            importlib.import_module(seeker)
    before = its_own()
    for key in before:
        del sys.modules[key]
    sys.modules.update(_loaded.get(name, {}))
    sys.path.insert(0, str(HOMES[name]))
    try:
        module = importlib.import_module(name)
        for part in parts:
            importlib.import_module(f"{name}.{part}")
        _loaded[name] = its_own()
        yield module
    finally:
        sys.path.remove(str(HOMES[name]))
        for key in its_own():
            del sys.modules[key]
        sys.modules.update(before)


class Layer(nn.Module):
    """Projections (N, L, 16) to heads (N, L, H, D), around an attention over them."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.to_q, self.to_k, self.to_v = (nn.Linear(16, HEADS * WIDTH, bias=False) for _ in range(3))
        self.to_out = nn.Linear(HEADS * WIDTH, 16)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).reshape(*x.shape[:2], HEADS, WIDTH) for f in (self.to_q, self.to_k, self.to_v))
        out = self.attend(q, k, v)
        return self.to_out(out.reshape(*x.shape[:2], HEADS * WIDTH)) + x


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """PyTorch's own, over (N, L, H, D)."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)


def captured(attend: Attend, **tolerances: float) -> Captured:
    """The capture of a layer, which gives what the layer gives."""
    module, call = Layer(attend), flatten_call((X,), {}, CPU)
    found = capture(module.forward, call, [X], WeightArena(module))
    torch.testing.assert_close(found.graph_module(X)[0], module(X), **tolerances)
    return found


def ops(graph: fx.Graph) -> list[Any]:
    return [n.target for n in graph.nodes if n.op == "call_function"]


def as_recorded(graph_module: fx.GraphModule) -> list[Any]:
    """Each node but for its strides: nobody's memory lies as another's."""
    return [(op, target, args, meta and meta[:2]) for op, target, args, meta in described(graph_module)]


def refused(attend: Attend) -> str:
    """Why a layer is not captured."""
    module, call = Layer(attend), flatten_call((X,), {}, CPU)
    with pytest.raises(CaptureRefused) as caught:
        capture(module.forward, call, [X], WeightArena(module))
    return str(caught.value)


def both_ways(attend: Attend) -> None:
    """A real run of a layer is recorded as a run on fake tensors is."""
    module, call = Layer(attend), flatten_call((X,), {}, CPU)
    expected = module(X)
    trace = LiveTrace(call, WeightArena(module), CPU)
    result = trace.run(module, (X,), {})
    assert torch.equal(result, expected)
    assert trace.recorded() is not None, trace._why_not
    on_fakes = record(lambda x: [module(x)], [X])
    assert as_recorded(trace.recorded()[0]) == as_recorded(on_fakes)
