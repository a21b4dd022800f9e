"""Capture: run the host's real forward once on fake tensors and record it as an FX graph.

`make_fx` with `pre_dispatch=True` records whatever the host runs, at the level of linear, conv2d, group_norm and
scaled_dot_product_attention. Autocast acts below that level, so `autocast.materialize_casts` adds its casts as nodes.
"""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from sfast_ext import reasons
from sfast_ext.call_signature import Call, NotOurs, flatten_output, rebuild_call
from sfast_ext.capture import autocast, functionalize, leftovers, quantised, slice_writes
from sfast_ext.capture.arguments import Containers, Edit
from sfast_ext.capture.fake_trace import finish_lazy_codegen, record
from sfast_ext.capture.known_values import ReadsArguments
from sfast_ext.capture.live_trace import LiveTrace
from sfast_ext.capture.real_tensors import LIFTS
from sfast_ext.capture.state import State
from sfast_ext.preparation import Interrupted
from sfast_ext.reasons import Declined, Reason
from sfast_ext.report import breathe, words_of
from sfast_ext.weights.arena import WeightArena
from sfast_ext.weights.weight import Weight

aten = torch.ops.aten
_READING = {aten._local_scalar_dense.default, aten.item.default, aten.nonzero.default}


class CaptureRefused(Declined):
    """There can be no plan of the forward. `details` is for developers. `passing` if another thread may be why: a later
    capture may succeed. `arguments` are the inputs, by place, that are all that a value which it reads follows from."""

    def __init__(
        self,
        reason: Reason,
        *,
        reads_value: bool = False,
        arguments: frozenset[int] = frozenset(),
        details: str | None = None,
        passing: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reads_value = reads_value
        self.arguments = arguments
        self.details = details
        self.passing = passing


OpSequence = tuple[Any, ...]
"""The operators of a recorded forward, in order."""


@dataclass
class Captured:
    """A recorded forward, with flat tensors as inputs and outputs. `op_sequence` was taken before any rewrite. `edits`
    are what it does to lists and dictionaries among its arguments."""

    graph_module: fx.GraphModule
    output_tree: Any
    output_strides: list[tuple[int, ...]]
    edits: tuple[Edit, ...]
    op_sequence: OpSequence
    seconds: float


Recorded = tuple[fx.GraphModule, Any, list[tuple[int, ...]], tuple[Edit, ...]]
"""The graph, the tree of the result, the strides of its tensors, and the edits of arguments."""


def capture(
    function: Callable[..., Any],
    call: Call,
    inputs: Sequence[torch.Tensor],
    arena: WeightArena,
    ignored: frozenset[str] = frozenset(),
    state: State | None = None,
) -> Captured:
    """Record `function` for one call. What it does to the state that it can reach is undone.

    Args:
        function: the original forward.
        call: the flattened arguments.
        inputs: the leaves of the call as tensors on the model's device, see `Call.tensors`.
        arena: identifies weights. Any other tensor that the forward reads is refused.
        ignored: attributes of modules without influence on behaviour, see `Hooks.ignored`.
        state: that of the forward, if it is known.

    Raises:
        CaptureRefused: the forward writes to a parameter or an argument, reads a value from the device or of a weight,
            draws random numbers, depends on data, keeps state, or reads a tensor of unknown owner.
        Interrupted: by the user, in a rehearsal.
    """
    started = time.perf_counter()
    recorded = _recorded(function, call, inputs, arena, ignored, state)
    return _finalize(*recorded, _op_sequence(recorded[0]), arena, started)


def capture_live(trace: LiveTrace, op_sequences: Container[OpSequence], arena: WeightArena) -> Captured | None:
    """The capture of a run that was recorded live, at no extra cost. None if there is no record, or if its operators
    are not a sequence that a capture on fake tensors gave before.

    Raises:
        CaptureRefused: see `capture`.
    """
    started = time.perf_counter()
    recorded = trace.recorded()
    if recorded is None:
        return None
    op_sequence = _op_sequence(recorded[0])
    return _finalize(*recorded, op_sequence, arena, started) if op_sequence in op_sequences else None


def _op_sequence(graph_module: fx.GraphModule) -> OpSequence:
    return tuple(node.target for node in graph_module.graph.nodes if node.op == "call_function")


def _finalize(
    graph_module: fx.GraphModule,
    tree: Any,
    strides: list[tuple[int, ...]],
    edits: tuple[Edit, ...],
    op_sequence: OpSequence,
    arena: WeightArena,
    started: float,
) -> Captured:
    _refuse_dynamic(graph_module)
    _bind_weights(graph_module, arena, _device(graph_module))
    _refuse_random(graph_module)
    slice_writes.join(graph_module.graph)
    refused = functionalize.functionalize(graph_module)
    if refused:
        raise CaptureRefused(refused)
    autocast.materialize_casts(graph_module, _device(graph_module).type)
    finish_lazy_codegen(graph_module)
    return Captured(graph_module, tree, strides, edits, op_sequence, time.perf_counter() - started)


def _device(graph_module: fx.GraphModule) -> torch.device:
    first = next(iter(graph_module.graph.nodes))
    return first.meta["val"].device if first.op == "placeholder" else torch.device("cpu")


def _recorded(
    function: Callable[..., Any],
    call: Call,
    inputs: Sequence[torch.Tensor],
    arena: WeightArena,
    ignored: frozenset[str],
    state: State | None,
) -> Recorded:
    arena.index()
    found: dict[str, Any] = {}

    def flat(*leaves: torch.Tensor) -> list[torch.Tensor]:
        args, kwargs = rebuild_call(call.tree, call.signature.joined(leaves))
        containers = Containers(args, kwargs)
        tree, outputs = flatten_output(function(*args, **kwargs))
        found["tree"], found["strides"] = tree, [tuple(o.stride()) for o in outputs]
        found["edits"] = containers.edits()
        return outputs

    before = State(arena.root, function, ignored) if state is None else state
    graph_module: fx.GraphModule | None = None
    refusal: CaptureRefused | Interrupted | None = None
    made: leftovers.Made = []
    try:
        as_hosts = contextlib.nullcontext() if arena.order.is_hosts() else arena.order.host()
        with as_hosts, torch.inference_mode(False), torch.no_grad():
            path = functools.partial(_path, arena)
            graph_module = record(flat, inputs, arena.root, ignored, path, made, call.values)
    except Interrupted as exc:
        refusal = exc
        leftovers.forget_locals(exc)
    except Exception as exc:
        refusal = _declined(exc) if isinstance(exc, NotOurs) else _refusal(exc, arena.root)
        refusal.__cause__ = exc
        leftovers.forget_locals(exc)
    finally:
        left_behind, passing = before.put_back(ignored_too=True)
    elsewhere = leftovers.take_out(made, graph_module)
    # the forward may have caught the interruption like a failure of its own code, and run another branch
    breathe()
    if refusal is not None:
        raise refusal
    left_behind = left_behind or elsewhere
    if left_behind or graph_module is None:
        raise CaptureRefused(reasons.KEEPS_STATE(left_behind), passing=passing)
    return graph_module, found["tree"], found["strides"], found["edits"]


def _path(arena: WeightArena, tensor: torch.Tensor) -> str | None:
    weight = arena.locate(tensor)
    return None if weight is None else weight.path


def _bind_weights(graph_module: fx.GraphModule, arena: WeightArena, device: torch.device) -> None:
    by_weight: dict[Weight, fx.Node] = {}
    for node in list(graph_module.graph.nodes):
        if node.op != "get_attr":
            continue
        tensor = getattr(graph_module, node.target)
        weight = arena.locate(tensor) if isinstance(tensor, torch.Tensor) else None
        if weight is not None and weight.tensor.device != device and arena.holds_table(weight):
            weight = _copied_table(node, weight, arena, device)
        if weight is None:
            # a literal of the forward, as torch.tensor(0.5), is lifted; changes of any other tensor cannot be detected
            if isinstance(tensor, torch.Tensor) and node.users and all(u.target in LIFTS for u in node.users):
                node.meta.setdefault("val", tensor)
                continue
            shape = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            reason = reasons.READS_TENSOR(shape)
            of_quantised = quantised.reading(arena.root, tensor)
            raise CaptureRefused(of_quantised or reason, details=str(reason) if of_quantised else None)
        node.meta["weight"] = weight
        if "val" not in node.meta or weight.source is not None:
            node.meta["val"] = _fake_like(weight.tensor if weight.source is not None else tensor, graph_module)
        first = by_weight.setdefault(weight, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph_module.graph.erase_node(node)


_MOVES = frozenset({aten.to.device, aten.to.dtype_layout, aten.to.other, aten._to_copy.default, aten.to.dtype})


def _copied_table(node: fx.Node, table: Weight, arena: WeightArena, device: torch.device) -> Weight | None:
    """The copy of a table on the device of the model, if that is where the forward copies it, and nothing else is done
    with it."""
    moved = all(
        user.target in _MOVES and isinstance(val := user.meta.get("val"), torch.Tensor) and val.device == device
        for user in node.users
    )
    return arena.table_on(table, device) if moved else None


def _fake_like(tensor: torch.Tensor, graph_module: fx.GraphModule) -> torch.Tensor:
    # before torch 2.5 attributes have no metadata
    for node in graph_module.graph.nodes:
        val = node.meta.get("val")
        if isinstance(val, FakeTensor):
            return val.fake_mode.from_tensor(tensor.detach(), static_shapes=True)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _refuse_dynamic(graph_module: fx.GraphModule) -> None:
    # newer torch continues with a symbol if older torch raises
    for node in graph_module.graph.nodes:
        val = node.meta.get("val")
        values = val if isinstance(val, (list, tuple)) else [val]
        symbolic = any(
            isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool))
            or (isinstance(v, torch.Tensor) and any(isinstance(s, torch.SymInt) for s in v.shape))
            for v in values
        )
        if symbolic or node.target in _READING:
            raise CaptureRefused(reasons.READS_VALUE(""), reads_value=True)


def _refuse_random(graph_module: fx.GraphModule) -> None:
    for node in graph_module.graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded not in tags:
            continue
        if _drops_nothing(node):
            continue
        if node.target is aten.scaled_dot_product_attention.default and not _dropout_p(node):
            continue
        raise CaptureRefused(reasons.DRAWS(node.target))


_DROPOUTS = {f"aten::{kind}dropout" for kind in ("", "feature_", "alpha_", "feature_alpha_")}


def _drops_nothing(node: fx.Node) -> bool:
    """Whether it is a dropout, in place or not, that is off."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.name.removesuffix("_") not in _DROPOUTS:
        return False
    p, train = (node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in ((1, "p"), (2, "train")))
    return train is False or p == 0.0


def _dropout_p(node: fx.Node) -> float:
    p = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    return float(p)  # type: ignore[arg-type]


_READS = ("DataDependent", "GuardOnDataDependent", "DynamicOutputShape")


def _declined(exc: NotOurs) -> CaptureRefused:
    reads = exc.reason.code == reasons.READS_VALUE.code and exc.reason == reasons.READS_VALUE("")
    reason = reasons.READS_VALUE(_where(exc)) if reads else exc.reason
    arguments = exc.arguments if isinstance(exc, ReadsArguments) else frozenset()
    return CaptureRefused(reason, reads_value=reads, arguments=arguments)


def _refusal(exc: Exception, root: nn.Module) -> CaptureRefused:
    kind, text = type(exc).__name__, str(exc)
    where = _where(exc)
    reads = (
        any(r in kind for r in _READS)
        or "_local_scalar_dense" in text
        or "data-dependent" in text
        or ".item()" in text
        or "allocate memory for" in text
        or "converting a torch.Tensor into a Python" in text
    )
    if reads:
        return CaptureRefused(reasons.READS_VALUE(where), reads_value=True)
    if "dynamo-optimized" in text:
        return CaptureRefused(reasons.CALLS_COMPILED(where))
    of_quantised = quantised.raising(root, exc.__traceback__)
    return CaptureRefused(of_quantised or reasons.NOT_RECORDED(kind, where), details=words_of(exc))


def _where(exc: Exception) -> str:
    torch_home, own_home = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
    for frame in reversed(traceback.extract_tb(exc.__traceback__)):
        # as a path: Windows' have either separator, as --data-dir was given
        if not str(Path(frame.filename)).startswith((torch_home, own_home, "<")):
            return f" ({Path(frame.filename).name}:{frame.lineno} in {frame.name})"
    return ""
