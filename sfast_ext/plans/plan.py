"""A plan: the rewritten graph of one signature, its kernels bound to shapes, and its CUDA graph."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from sfast_ext.call_signature import Call, Signature, as_tensor
from sfast_ext.kernels.backend import nvrtc
from sfast_ext.kernels.backend.graph_memory import peak_bytes
from sfast_ext.kernels.backend.input_copies import Copies
from sfast_ext.kernels.backend.pdl import pdl_capture
from sfast_ext.kernels.backend.triton_runtime import without_triton
from sfast_ext.plans import graph_facts
from sfast_ext.plans.graph_facts import View, bind_attributes, digest, hand_out, operation_counts, readonly
from sfast_ext.plans.graph_pool import CAN_UPDATE_GRAPH, CapturedGraph, GraphPool, NoGraph, pool_of
from sfast_ext.plans.recapture import Recapture, clocked
from sfast_ext.plans.recorded_run import RecordedRun
from sfast_ext.plans.register_machine import Interpreter, plan_mode
from sfast_ext.report import Report

_EAGER_RUNS = 4  # before the launches of a plan that has no CUDA graph are recorded
_CPU_BOUND = 0.8  # of a run's time, that of its launches
REPLAYING = "replaying"
NO_GRAPH = "running without a graph"
DROPPED = "dropped"


class Plan:
    """Runs the rewritten graph of one signature.

    Args:
        call: the call that was captured.
        graph_module: the rewritten graph. Takes and returns flat tensors.
        output_tree, output_strides: structure and strides of the original result, see `call_signature.flatten_output`
            and `rebuild_output`.
        fused: the number of matches of each pass.
        triton: whether the graph was rewritten for Triton's kernels; otherwise none is launched.
        outgrowing: see `graph_memory.outgrowing`. Before each of these the allocator's cache is given back.
    """

    def __init__(
        self,
        call: Call,
        graph_module: fx.GraphModule,
        output_tree: Any,
        output_strides: Sequence[tuple[int, ...]],
        device: torch.device,
        fused: dict[str, int],
        triton: bool = True,
        outgrowing: Collection[fx.Node] = (),
    ) -> None:
        self.signature = call.signature
        self.device = device
        self.pool: GraphPool | None = pool_of(device) if device.type == "cuda" else None
        """Holds its CUDA graph."""
        self.fused = fused
        self.state = NO_GRAPH
        self.label = self.signature.words()
        """How the user calls it."""
        self.generation_of_use = 0
        """The generation in which it ran last, by number."""
        self.used_at: float | None = None
        """When a generation used it last, by `time.time`."""
        self.shape_signature: Signature | None = None
        """What its call has in common with calls that differ in constants."""
        self.built_for: list[Any] | None = None
        """The nested numbers of the call that it was built for, if some of them are inputs."""
        self.compare_again = False
        """Whether a result is compared with the original's once more: one of those numbers is another, or a weight that
        is quantised."""
        self.weights_due = False
        """Whether the next run asks if quantised weights changed, see `runtime.eight_bits`."""
        self.weights_state: torch.Tensor | None = None
        """Their state, if the last run asked."""
        self.compared_weights: set[int] = set()
        """Their states with which a comparison went well."""
        self.no_graph_reason: str | None = None
        self.was_captured = False
        """Whether it had a CUDA graph before, which may be gone."""
        self.captures = 1
        self.replays = 0
        self.out_of_memory = 0
        self.error: float | None = None
        self.rounding_error: float | None = None
        """Its distance from the original if that is rounding; `error` is then that from float32."""
        self.noise: list[float] | None = None
        """How far each result of the original moves if operations round otherwise, see `rounding`; None if that was
        not measured."""
        self.ms_before: float | None = None
        self.ms_after: float | None = None
        self.first_call_s: float | None = None
        self.peak_bytes: int | None = None
        """Bytes that its values need at one time, without inputs, weights and libraries' workspaces; None if its calls
        are not rare, see `Config.rare_calls`."""
        self._peak_bytes = peak_bytes(graph_module.graph) if device.type == "cuda" else 0
        self._operations, self._digest = operation_counts(graph_module.graph), digest(graph_module)
        self.edits: tuple[Any, ...] = ()
        """What a call does to lists and dictionaries among its arguments, see `capture.arguments`."""
        self.rounds_inputs = graph_facts.rounds_inputs(graph_module.graph)
        """Whether the original's own products round their inputs to 8 bits."""
        self.weights, self.banks = bind_attributes(graph_module)
        self.rounds_inputs = self.rounds_inputs and not self.banks
        self._copied = [(each.tensor, each.source) for each in self.weights if each.source is not None]
        self._graph_module = graph_module
        self._triton = triton
        self._function = self._served(Interpreter(graph_module, outgrowing))
        """What runs the graph: an interpreter, or a recorded run."""
        self._warm = threading.local()
        """Whether the capture needs no run before it in this thread: libraries have handles and choices for each."""
        self._recorded: bool | None = False if outgrowing else None
        """Whether launches are repeated; False if they cannot be, as with `outgrowing`; None if not so far."""
        self._clocked_once = False
        """Whether a run without a CUDA graph was timed."""
        self._eager_runs = 0
        self.recapture = Recapture()
        self._runs_before = 0
        """Those before its CUDA graph was evicted last."""
        self.output_tree = output_tree
        self._output_strides = list(output_strides)
        self.views: dict[int, View] = {}
        """Results in the memory of others."""
        self.lent: frozenset[int] = frozenset()
        """Results in the memory of inputs or weights. They are normal tensors under inference mode as well."""
        self._set_static_inputs([])
        self.graph: CapturedGraph | None = None
        """Its CUDA graph."""

    @property
    def resident(self) -> bool:
        """Whether it reads 8-bit integers that the arena brings up to date, see `weights.resident`."""
        return bool(self.banks and self.banks[0].sources)

    @property
    def has_graph(self) -> bool:
        """Whether a CUDA graph is captured."""
        return self.graph is not None

    def run_eagerly(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Run the graph operation by operation. Returns the flat outputs as new tensors."""
        self._eager_runs += 1
        if self.pool is not None:
            self.recapture.ran_without(self.ms_after)
        with self._current():
            with plan_mode(self.device):
                self._copy_tables()
                outputs = self._function(*[as_tensor(leaf, self.device) for leaf in leaves])
            return self._copy_outputs(outputs)

    def records_now(self, captures: bool = False) -> bool:
        """Whether `record_launches` is due: its CUDA graph is gone, or it ran without one a few times.

        Args:
            captures: the next thing is to capture a graph.
        """
        if self._recorded is not None or self.graph is not None or self.pool is None:
            return False
        if captures:
            return self.recapture.recurs
        return not self._clocked_once and (self.was_captured or self._eager_runs >= _EAGER_RUNS)

    def record_launches(self, leaves: Sequence[Any], report: Report, captures: bool = False) -> None:
        """Repeat launches from now on (`recorded_run`), if the CPU takes longer with them than the GPU, or if a graph
        is captured next. The inputs are those of a call; there was a run before."""
        if self._recorded is not None or self.device.type != "cuda":
            return
        self._clocked_once = True
        try:
            with plan_mode(self.device), torch.cuda.device(self.device):
                inputs = [as_tensor(leaf, self.device) for leaf in leaves]
                launched, ended = self.recapture.launch_s, 0.0
                if not captures:
                    launched, ended = clocked(self._function, inputs, self.device)
                if launched >= _CPU_BOUND * ended:
                    self._recorded = False
                    recorded = self._served(RecordedRun)(Interpreter(self._graph_module), inputs)
                    self._function, self._recorded = self._served(recorded), True
                    before, (launched, ended) = launched, clocked(self._function, inputs, self.device)
                    self.recapture.recorded(1000 * (before - launched))
                self.recapture.without_ms = 1000 * ended
        except Exception as exc:  # the plan is right without
            self._recorded = bool(self._recorded)
            report.event("launches", f"they are not repeated: {type(exc).__name__}: {exc}")

    def recaptures_at_once(self) -> bool:
        """Whether the CUDA graph that was evicted is captured before a run without it, see `Recapture`."""
        return self.was_captured and self.recapture.pays_at_once(self.ms_after, self.replays - self._runs_before)

    def waits_for_graph(self) -> bool:
        """Whether it runs without the CUDA graph that was evicted for now, see `Recapture`."""
        return self.was_captured and self.graph is None and not self.recapture.is_due(self.ms_after)

    def _served(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return run if self._triton else without_triton()(run)

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        """The plan's GPU as the current one, as repeated launches need it."""
        if not self._recorded:
            return contextlib.nullcontext()
        assert self.device.index is not None
        nvrtc.bind(self.device.index)
        return torch.cuda.device(self.device)

    def replay(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Copy the inputs, replay the CUDA graph, copy the outputs to new tensors. The caller holds the pool's lock."""
        if torch.is_grad_enabled():
            # checking costs a fraction of switching
            with torch.no_grad():
                return self._replay(leaves)
        return self._replay(leaves)

    def _replay(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        captured, pool = self.graph, self.pool
        assert captured is not None and pool is not None
        stream = pool.begin_use()
        self._copy_inputs(leaves)
        captured.graph.replay()
        outputs = self._copy_outputs(captured.outputs)
        pool.end_use(stream, captured)
        return outputs

    def capture_graph(
        self,
        leaves: Sequence[Any],
        report: Report,
        max_graphs: int,
        budget_mb: int,
        share: float = 1.0,
    ) -> bool:
        """Capture the CUDA graph. Returns whether that was done; else the reason is in `no_graph_reason`.

        Args:
            share: its weight in `max_graphs`, less than one for a part of a model.
        """
        pool = self.pool
        assert pool is not None
        with pool.lock, torch.inference_mode(False), torch.no_grad():
            if not self._inputs:
                self._set_static_inputs([as_tensor(leaf, self.device).clone() for leaf in leaves])
                self._copy_tables()
            else:
                self._copy_inputs(leaves)
            while self.graph is None:
                warm = getattr(self._warm, "done", False)
                try:
                    if not warm:
                        self._warm_up(pool)
                    self.graph = pool.capture(
                        self._run_captured,
                        self._on_evict,
                        report,
                        max_graphs=max_graphs,
                        budget_mb=budget_mb,
                        share=share,
                        expected=self._peak_bytes,
                    )
                except (NoGraph, torch.cuda.OutOfMemoryError) as exc:
                    self._warm.done = False
                    if not warm:
                        self.no_graph_reason = str(exc)
                        report.event("graph pool", f"a plan runs without a CUDA graph: {exc}")
                        self._set_static_inputs([])
                        return False
            self._warm.done = True
            if CAN_UPDATE_GRAPH:
                self._copies.join(*self.graph.handles())
            self.recapture.captured(self.graph.ms, self.graph.launch_ms)
            if self.was_captured and not self._clocked_once:
                # before the first capture kernels are compiled
                self.recapture.without_ms = self.graph.launch_ms
            report.count("graph_captures")
            self.state, self.was_captured = REPLAYING, True
            return True

    def drop_graph(self) -> None:
        """Free the CUDA graph and the static inputs."""
        graph = self.graph
        self._on_evict()
        if graph is not None and self.pool is not None:
            self.pool.drop(graph)

    def close(self) -> None:
        """Free everything. The graph module is a reference cycle, so its tensors are removed explicitly."""
        self._function = _closed
        try:
            if self.banks and self.pool is not None:
                # their memory goes back to the allocator, and the last launch may still read it
                with self.pool.lock:
                    torch.cuda.synchronize(self.device)
            self.drop_graph()
        finally:
            self.state = DROPPED
            self._drop_tensors()

    def _drop_tensors(self) -> None:
        for name in [n for n, value in self._graph_module.__dict__.items() if isinstance(value, torch.Tensor)]:
            del self._graph_module.__dict__[name]
        self.weights, self.banks, self._copied = [], [], []

    def speedup(self) -> float | None:
        """How many times faster than the original, both timed alike when it was made. None if they were not: on a
        CPU the original's time is that of its first run."""
        if self.device.type != "cuda" or not self.ms_before or not self.ms_after:
            return None
        return self.ms_before / self.ms_after

    def status(self) -> dict[str, Any]:
        """For the report."""
        return {
            "label": self.label,
            "signature": self.signature.words(),
            "state": self.state,
            "resident": self.resident,
            "no_graph_reason": self.no_graph_reason,
            "captures": self.captures,
            "replays": self.replays,
            "used_at": self.used_at,
            "ms_before": self.ms_before,
            "ms_after": self.ms_after,
            "speedup": self.speedup(),
            "first_call_s": self.first_call_s,
            "memory_mb": round(self.graph.size / 2**20, 1) if self.graph else 0.0,
            "error": self.error,
            "fused": dict(self.fused),
            "operations": dict(self._operations),
            "digest": self._digest,
        }

    def _run_static(self) -> list[torch.Tensor]:
        with plan_mode(self.device):
            return list(self._function(*self._inputs))

    def _run_captured(self) -> list[torch.Tensor]:
        if CAN_UPDATE_GRAPH:
            self._copies.begin()
        # these only change between replays
        unwritten = readonly(self._graph_module, [weight.tensor for weight in self.weights])
        with pdl_capture(unwritten):
            return self._run_static()

    def _warm_up(self, pool: GraphPool) -> None:
        # before the first capture: kernels compile, libraries choose algorithms and allocate workspaces
        side, current = pool.side_stream(), torch.cuda.current_stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._run_static()
        current.wait_stream(side)

    def _set_static_inputs(self, inputs: list[torch.Tensor]) -> None:
        """Set the tensors that the CUDA graph reads. Empty without a graph."""
        self._inputs, self._copies = inputs, Copies(inputs)

    def _copy_tables(self) -> None:
        """Update the tables that are on another device."""
        for live, source in self._copied:
            live.copy_(source, non_blocking=True)

    def _copy_inputs(self, leaves: Sequence[Any]) -> None:
        self._copy_tables()
        sources: list[torch.Tensor | None] = []
        for static, leaf in zip(self._inputs, leaves):
            if not isinstance(leaf, torch.Tensor):
                static.fill_(leaf)
                leaf = None
            elif leaf.device != self.device and leaf.numel() == 1:
                # a copy from pageable memory would synchronize
                static.fill_(leaf.item())
                leaf = None
            sources.append(leaf)
        self._copies(sources)

    def _copy_outputs(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # inference tensors if that is the caller's mode, as the original's results are
        handed = []
        for i, (output, stride) in enumerate(zip(outputs, self._output_strides)):
            view = i in self.views
            handed.append(output if view else output.new_empty_strided(output.shape, stride).copy_(output))
        if self.lent and torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                for i in self.lent:
                    handed[i] = handed[i].new_empty_strided(handed[i].shape, handed[i].stride()).copy_(handed[i])
        if self.views:
            hand_out(handed, outputs, self.views)
        return handed

    def _on_evict(self) -> None:
        self.recapture.evicted(self.replays - self._runs_before)
        self.graph, self._runs_before = None, self.replays
        self._set_static_inputs([])
        if self.state == REPLAYING:
            self.state = NO_GRAPH


def _closed(*_: torch.Tensor) -> Sequence[torch.Tensor]:
    raise RuntimeError("the plan was dropped while it was about to run")
