"""A plan: what runs for one signature. The rewritten graph, its kernels bound to shapes, and its CUDA graph."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from sfast_ext.call_signature import Call, as_tensor, rebuild_output
from sfast_ext.kernels.backend.pdl import pdl_capture
from sfast_ext.report import Report
from sfast_ext.runtime import operations
from sfast_ext.runtime.graph_pool import KEEPS, CapturedGraph, GraphPool, NoGraph
from sfast_ext.runtime.input_copies import Copies
from sfast_ext.runtime.interpreter import Program
from sfast_ext.runtime.peak_memory import peak_bytes
from sfast_ext.timing import timer
from sfast_ext.weights.arena import Weight

REPLAYING = "replaying"
NO_GRAPH = "running without a graph"
DROPPED = "dropped"

TIMED = 3


class Plan:
    """Runs the rewritten graph of one signature.

    Args:
        call: the call that it was captured from.
        graph_module: flat tensors in, flat tensors out; already rewritten.
        output_tree, output_strides: how the original forward's result looks, see `signature.flatten_output`.
        fused: how often each pass matched.
    """

    def __init__(
        self,
        call: Call,
        graph_module: fx.GraphModule,
        output_tree: Any,
        output_strides: Sequence[tuple[int, ...]],
        device: torch.device,
        fused: dict[str, int],
    ) -> None:
        self.signature = call.signature
        self.device = device
        self.fused = fused
        self.state = NO_GRAPH
        self.behaviour = 0
        """The number of the behaviour it was captured under, see `BehaviourKeys`."""
        self.no_graph_reason: str | None = None
        self.captures = 1
        self.replays = 0
        self.out_of_memory = 0
        self.error: float | None = None
        self.ms_before: float | None = None
        self.ms_after: float | None = None
        self.first_call_s: float | None = None
        self._expected = peak_bytes(graph_module.graph) if device.type == "cuda" else 0
        self._operations, self._digest = operations.counts(graph_module.graph), operations.digest(graph_module)
        self.weights = _bind_attributes(graph_module)
        self._graph_module = graph_module
        self._function: Callable[..., Sequence[torch.Tensor]] = Program(graph_module)
        self._output_tree = output_tree
        self._output_strides = list(output_strides)
        self._take([])
        self._graph: CapturedGraph | None = None

    @property
    def has_graph(self) -> bool:
        """Whether a CUDA graph is at hand."""
        return self._graph is not None

    def run_eagerly(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Run the rewritten graph operation by operation; returns the flat outputs, in memory of their own."""
        with plan_mode(self.device):
            outputs = self._function(*[as_tensor(leaf, self.device) for leaf in leaves])
            return self._hand_out(outputs)

    def replay(self, leaves: Sequence[Any], pool: GraphPool) -> list[torch.Tensor]:
        """Copy the inputs in, replay the CUDA graph, copy the outputs out. The caller holds the pool's lock."""
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            # a look takes a fraction of what a switch does
            with torch.inference_mode(False), torch.no_grad():
                return self._replay(leaves, pool)
        return self._replay(leaves, pool)

    def _replay(self, leaves: Sequence[Any], pool: GraphPool) -> list[torch.Tensor]:
        captured = self._graph
        assert captured is not None
        stream = pool.enter()
        self._fill(leaves)
        captured.graph.replay()
        outputs = self._hand_out(captured.outputs)
        pool.leave(stream)
        pool.touch(captured)
        return outputs

    def output(self, outputs: Sequence[torch.Tensor]) -> Any:
        """The flat outputs in the form the original forward returns."""
        return rebuild_output(self._output_tree, outputs)

    def capture_graph(
        self,
        leaves: Sequence[Any],
        pool: GraphPool,
        report: Report,
        max_graphs: int,
        budget_mb: int,
        share: float = 1.0,
    ) -> bool:
        """Capture the CUDA graph; False where it cannot be, with the reason in `no_graph_reason`.

        `share` is what it counts for among `max_graphs`: less than one for a part of a model.
        """
        with pool.lock, torch.inference_mode(False), torch.no_grad():
            if not self._inputs:
                self._take([as_tensor(leaf, self.device).clone() for leaf in leaves])
            else:
                self._fill(leaves)
            try:
                self._warm_up(pool)
                self._graph = pool.capture(
                    self._run_captured,
                    self._evicted,
                    report,
                    max_graphs=max_graphs,
                    budget_mb=budget_mb,
                    share=share,
                    expected=self._expected,
                )
            except (NoGraph, torch.cuda.OutOfMemoryError) as exc:
                self.no_graph_reason = str(exc)
                report.event("graph pool", f"a plan runs without a CUDA graph: {exc}")
                self._take([])
                return False
            if KEEPS:
                self._copies.join(*self._graph.handles())
            report.count("graph_captures")
            self.state = REPLAYING
            return True

    def drop_graph(self, pool: GraphPool | None) -> None:
        """Give the CUDA graph and the static inputs back."""
        graph = self._graph
        self._evicted()
        if graph is not None and pool is not None:
            pool.discard(graph)

    def close(self, pool: GraphPool | None) -> None:
        """Let go of everything; the graph module is a ring of references that would wait for the collector."""
        self._function = _closed
        try:
            self.drop_graph(pool)
        finally:
            self.state = DROPPED
            self._let_go()

    def _let_go(self) -> None:
        for name in [n for n, value in self._graph_module.__dict__.items() if isinstance(value, torch.Tensor)]:
            del self._graph_module.__dict__[name]
        self.weights = []

    def status(self) -> dict[str, Any]:
        """For the report."""
        return {
            "signature": self.signature.words(),
            "state": self.state,
            "no_graph_reason": self.no_graph_reason,
            "captures": self.captures,
            "replays": self.replays,
            "ms_before": self.ms_before,
            "ms_after": self.ms_after,
            "first_call_s": self.first_call_s,
            "memory_mb": round(self._graph.size / 2**20, 1) if self._graph else 0.0,
            "error": self.error,
            "fused": dict(self.fused),
            "operations": dict(self._operations),
            "digest": self._digest,
        }

    def _run_static(self) -> list[torch.Tensor]:
        with plan_mode(self.device):
            return list(self._function(*self._inputs))

    def _run_captured(self) -> list[torch.Tensor]:
        if KEEPS:
            self._copies.begin()
        # weights change between replays, if they do
        with pdl_capture(weight.tensor for weight in self.weights):
            return self._run_static()

    def _warm_up(self, pool: GraphPool) -> None:
        # outside the capture: kernels compile, libraries pick algorithms and allocate workspaces
        side, current = pool.side_stream(), torch.cuda.current_stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._run_static()
        current.wait_stream(side)

    def _take(self, inputs: list[torch.Tensor]) -> None:
        """What the CUDA graph reads, none where there is no graph."""
        self._inputs, self._copies = inputs, Copies(inputs)

    def _fill(self, leaves: Sequence[Any]) -> None:
        sources: list[torch.Tensor | None] = []
        for static, leaf in zip(self._inputs, leaves):
            if not isinstance(leaf, torch.Tensor):
                static.fill_(leaf)
                leaf = None
            elif leaf.device != self.device and leaf.numel() == 1:
                # a copy from pageable memory would wait for the GPU
                static.fill_(leaf.item())
                leaf = None
            sources.append(leaf)
        self._copies(sources)

    def _hand_out(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        handed = []
        for output, stride in zip(outputs, self._output_strides):
            own = output.new_empty_strided(output.shape, stride)
            handed.append(own.copy_(output))
        return handed

    def _evicted(self) -> None:
        self._graph = None
        self._take([])
        if self.state == REPLAYING:
            self.state = NO_GRAPH


def _closed(*_: torch.Tensor) -> Sequence[torch.Tensor]:
    raise RuntimeError("the plan was dropped while it was about to run")


def _bind_attributes(graph_module: fx.GraphModule) -> list[Weight]:
    """Let the graph's attributes be the live tensors of the arena; returns the weights it reads."""
    weights: dict[int, Weight] = {}
    used = set()
    for node in graph_module.graph.nodes:
        if node.op != "get_attr":
            continue
        used.add(node.target)
        weight = node.meta.get("weight")
        if weight is not None:
            weights[id(weight)] = weight
            _plain_attribute(graph_module, node.target, weight.tensor)
        else:
            _plain_attribute(graph_module, node.target, getattr(graph_module, node.target).detach())
    for name in [*graph_module._parameters, *graph_module._buffers]:
        if name not in used:
            # a weight that was packed away; holding it here would keep its old memory
            delattr(graph_module, name)
    for name, value in list(graph_module.__dict__.items()):
        if isinstance(value, torch.Tensor) and name not in used:
            delattr(graph_module, name)
    for node in graph_module.graph.nodes:
        # fake tensors are of no more use, and keep the whole fake mode
        node.meta.clear()
    return list(weights.values())


def _plain_attribute(graph_module: fx.GraphModule, name: str, tensor: torch.Tensor) -> None:
    for registry in (graph_module._parameters, graph_module._buffers):
        registry.pop(name, None)
    graph_module.__dict__[name] = tensor


@contextlib.contextmanager
def plan_mode(device: torch.device) -> Iterator[None]:
    """The state plans run in: no autograd, no autocast (its casts are nodes).

    cuDNN picks its algorithms as the host has it pick them: measuring takes 0.5 to 1 s of a first call, and found none
    quicker on an NVIDIA H200 at SD 1.5's 512x512 and for SDXL; elsewhere it is open (benchmarks/profile/profile.md).
    """
    # tensors made in inference mode could not be written to outside of it
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def relative_error(outputs: Sequence[torch.Tensor], references: Sequence[torch.Tensor]) -> float:
    """The largest relative L2 error of a list of tensors, in fp32; infinite where a value is NaN or Inf and the
    reference's is not, or where shapes differ. Values that the reference itself has not finite do not count."""
    worst = 0.0
    if len(outputs) != len(references):
        return math.inf
    for output, reference in zip(outputs, references):
        if output.shape != reference.shape or output.dtype != reference.dtype:
            return math.inf
        if not reference.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(output, reference) else math.inf)
            continue
        ours, theirs = output.float(), reference.float()
        finite = torch.isfinite(theirs)
        if not bool(torch.isfinite(ours[finite]).all()):
            return math.inf
        zero = torch.zeros((), device=theirs.device)
        theirs = torch.where(finite, theirs, zero)
        distance, norm = _norm(torch.where(finite, ours, zero) - theirs), _norm(theirs)
        worst = max(worst, distance / norm if norm > 0 else distance)
    return worst


def _norm(values: torch.Tensor) -> float:
    # squares of float32 overflow from 2e19 on, and where both norms are infinite there is no error to be told
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def comparable(references: Sequence[torch.Tensor]) -> bool:
    """Whether there is a value that another result can be compared with: a model may give NaN and nothing else."""
    return any(not r.is_floating_point() or bool(torch.isfinite(r).any()) for r in references)


def milliseconds(run: Callable[[], Any], device: torch.device, times: int = TIMED) -> float:
    """The median of so many times of a call: on a GPU by events, which waits for it; on a CPU by `timing.timer`."""
    if device.type != "cuda":
        return sorted(timer.milliseconds(run) for _ in range(times))[times // 2]
    taken = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return sorted(taken)[len(taken) // 2]
