"""Capture while the original forward runs on real tensors, as it does for each new signature anyway.

A dispatch mode records at the level of `fake_trace.record` and passes each operation on unchanged, so the result is
bitwise the original's. Unlike a fake tensor, a real one can be read by Python. So the trace is only used if fake
tensors gave the same operations in the same order for another signature of the same behaviour (`Captured.op_sequence`).
And an operation that returns values to Python or to the CPU ends the trace.

This depends on internals of torch. If they are not as expected, nothing is recorded.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sfast_ext.call_signature import Call, flatten_output
from sfast_ext.capture import foreign_ops, opaque
from sfast_ext.capture.arguments import Containers, Edit
from sfast_ext.capture.fake_trace import PLAIN, fake_mode
from sfast_ext.capture.interception import intercepted
from sfast_ext.capture.real_tensors import LIFTS, READS, value_read
from sfast_ext.environment import TORCH
from sfast_ext.report import logger
from sfast_ext.weights.arena import WeightArena

try:
    from torch._dispatch.python import enable_python_dispatcher
    from torch._ops import _len_torch_dispatch_stack_pre_dispatch as _modes_before
    from torch.fx._lazy_graph_module import _LazyGraphModule
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
    from torch.overrides import _len_torch_function_stack as _function_modes
    from torch.utils._python_dispatch import _len_torch_dispatch_stack as _modes
except ImportError:
    ProxyTorchDispatchMode = TorchDispatchMode  # type: ignore[misc]
    _modes_before = None

# earlier versions keep modes of this level in another way
SUPPORTED = _modes_before is not None and hasattr(torch._C, "_DisablePythonDispatcher")
SUPPORTED = SUPPORTED and TORCH >= (2, 6)
aten = torch.ops.aten
_FAST_PATHS = nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder


class _Unsupported(Exception):
    """This call cannot be recorded."""


class LiveTrace:
    """Records one run of the original forward.

    Args:
        call: the flattened arguments.
        arena: identifies weights.
        device: the device of the model.
    """

    def __init__(self, call: Call, arena: WeightArena, device: torch.device) -> None:
        self._arena = arena
        self._device = device
        self._why_not: str | None = None
        self._silent = False  # inside a function that is recorded as one operation
        self._noting = False
        self._root = nn.Module()
        self._graph = fx.Graph()
        # weak references: the id of a deleted tensor may be reused
        self._nodes: dict[int, tuple[weakref.ref[torch.Tensor], fx.Node]] = {}
        self._held: dict[int, tuple[torch.Tensor, fx.Node]] = {}
        self._mode = fake_mode() if SUPPORTED else None
        self._output: tuple[Any, list[tuple[int, ...]], tuple[Edit, ...]] | None = None
        try:
            self._begin(call)
        except Exception as exc:
            self._give_up(exc)

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        undo: Callable[[], Any] = lambda: None,
    ) -> Any:
        """The result of `function`. If it raises under the mode, it is called again without, after `undo`."""
        if self._why_not is None:
            containers = Containers(args, kwargs)
            try:
                recorders = foreign_ops.recorders()
                whole = {function: functools.partial(self._as_a_whole, r) for function, r in recorders.items()}
                with enable_python_dispatcher(), _RecordingMode(self._note), _Reads(self), intercepted(whole):
                    result = function(*args, **kwargs)
                self._end(result, containers)
                return result
            except Exception as exc:
                self._give_up(exc)
                undo()
                containers.put_back()
        return function(*args, **kwargs)

    def recorded(self) -> tuple[fx.GraphModule, Any, list[tuple[int, ...]], tuple[Edit, ...]] | None:
        """The graph as `fake_trace.record` returns it, the tree of the result, the strides of its tensors, and what was
        done to the arguments. None if the call was not recorded."""
        if self._output is None:
            logger.debug("the original's run was not recorded: %s", self._why_not)
            return None
        # lazy: passes change it before it runs, and code generation takes a tenth of a second
        return _LazyGraphModule(self._root, self._graph), *self._output

    def note_read(self) -> None:
        """Python reads the value of a tensor."""
        if not self._noting and not self._silent:
            self._give_up(_Unsupported("a value is read"))

    def _give_up(self, why: Exception) -> None:
        self._why_not = f"{type(why).__name__}: {why}"
        self._nodes.clear()

    def _begin(self, call: Call) -> None:
        if self._mode is None:
            raise _Unsupported("this torch keeps its modes in another way")
        if _modes() or _modes_before() or _function_modes():
            raise _Unsupported("another mode is active")
        if any(isinstance(module, _FAST_PATHS) for module in self._arena.root.modules()):
            raise _Unsupported("torch's own fast path is taken without a mode of functions only")
        self._arena.index()
        for leaf in call.leaves:
            plain = isinstance(leaf, torch.Tensor) and leaf.device == self._device and leaf.is_contiguous()
            if not plain or id(leaf) in self._nodes:
                raise _Unsupported("an argument is no contiguous tensor of its own on the model's device")
            node = self._graph.placeholder(f"arg{len(self._nodes)}_1")
            node.meta["val"] = self._like(leaf)
            self._nodes[id(leaf)] = weakref.ref(leaf), node

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self._why_not is not None or self._silent:
            return
        self._noting = True
        try:
            self._record(func, args, kwargs, result)
        except Exception as exc:
            self._give_up(exc)
        finally:
            self._noting = False

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        known = func.namespace == "aten" or func is opaque.OPERATOR
        if not known or not READS.isdisjoint(func.tags):
            raise _Unsupported(f"{func} reads values, or does what is not known")
        given: list[torch.Tensor] = []
        lifts = func in LIFTS
        nodes, named = self._argument(args, given, lifts), self._argument(kwargs, given, lifts)
        if func is aten.lift_fresh.default:
            # as make_fx does: the literal itself must not be written
            func = aten.lift_fresh_copy.default
        node = self._graph.create_node("call_function", func, nodes, named, name=func.overloadpacket.__name__)
        several = isinstance(result, (list, tuple))
        parts = list(result) if several else [result]
        if any(not isinstance(x, torch.Tensor) for x in parts):
            raise _Unsupported(f"{func} gives what is no tensor")
        if any(x.device.type == "cpu" for x in parts) and any(x.device.type != "cpu" for x in given):
            raise _Unsupported(f"{func} brings values to the CPU")
        fakes = [self._like(x) for x in parts]
        node.meta["val"] = fakes if several else fakes[0]
        for i, (x, fake) in enumerate(zip(parts, fakes)):
            own = node
            if several:
                own = self._graph.create_node("call_function", operator.getitem, (node, i), name="getitem")
                own.meta["val"] = fake
            self._nodes[id(x)] = weakref.ref(x), own

    def _as_a_whole(
        self, recorder: foreign_ops.Recorder, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """A function of another library: it runs on real tensors, and the recorder runs on fake ones for the graph."""
        inside, self._silent = self._silent, True
        try:
            result = original(*args, **kwargs)
        finally:
            self._silent = inside
        if not inside and self._why_not is None:
            try:
                self._record_whole(functools.partial(recorder, original), args, kwargs, result)
            except Exception as exc:
                self._give_up(exc)
        return result

    def _record_whole(
        self, recorder: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        assert self._mode is not None
        fakes = pytree.tree_map(self._stand_in, (args, kwargs))
        with self._mode:
            fake_result = recorder(*fakes[0], **fakes[1])
        real, expected = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (result, fake_result))
        for x, fake in zip(real, expected, strict=True):
            if x.shape != fake.shape or x.dtype != fake.dtype:
                raise _Unsupported(f"{recorder} gives {fake.shape}, {fake.dtype}, not {x.shape}, {x.dtype}")
            self._nodes[id(x)] = weakref.ref(x), self._node(fake, False)

    def _stand_in(self, x: Any) -> Any:
        """A new fake tensor for a tensor, with the same node."""
        if type(x) not in (torch.Tensor, nn.Parameter):
            return x
        assert self._mode is not None
        node = self._node(x, False)
        fake = self._mode.fresh(x.dtype, tuple(x.shape), x.stride(), x.storage_offset(), x.device)
        self._nodes[id(fake)] = weakref.ref(fake), node
        return fake

    def _argument(self, x: Any, given: list[torch.Tensor], lifts: bool) -> Any:
        if isinstance(x, torch.Tensor):
            given.append(x)
            return self._node(x, lifts)
        if isinstance(x, (list, tuple)):
            return type(x)(self._argument(item, given, lifts) for item in x)
        if isinstance(x, dict):
            return {name: self._argument(item, given, lifts) for name, item in x.items()}
        if type(x) not in PLAIN:
            raise _Unsupported(f"an argument is a {type(x).__name__}")
        return x

    def _node(self, x: torch.Tensor, lifts: bool) -> fx.Node:
        reference, node = self._nodes.get(id(x), (None, None))
        if node is not None and reference is not None and reference() is x:
            return node
        kept, node = self._held.get(id(x), (None, None))
        if node is not None and kept is x:
            return node
        if self._arena.locate(x) is not None:
            held = x
        elif lifts:
            # a literal of the forward, which it may write to
            held = x.detach().clone()
        else:
            raise _Unsupported("a tensor of unknown owner is read")
        name = f"held_{len(self._held)}"
        if isinstance(held, nn.Parameter):
            self._root.register_parameter(name, held)
        else:
            self._root.register_buffer(name, held)
        node = self._graph.get_attr(name)
        node.meta["val"] = self._like(held)
        self._held[id(x)] = x, node
        return node

    def _like(self, x: torch.Tensor) -> FakeTensor:
        """A fake tensor with the same metadata, shared by all tensors with these metadata."""
        if isinstance(x, FakeTensor) and x.fake_mode is self._mode:
            return x
        if type(x) not in (torch.Tensor, nn.Parameter) or x.layout is not torch.strided or x.is_quantized:
            raise _Unsupported(f"a tensor is a {type(x).__name__} with layout {x.layout}")
        assert self._mode is not None
        return self._mode.made(x.dtype, tuple(x.shape), x.stride(), x.storage_offset(), x.device)

    def _end(self, result: Any, containers: Containers) -> None:
        if self._why_not is not None:
            return
        try:
            tree, outputs = flatten_output(result)
            self._graph.output([self._node(x, False) for x in outputs])
            self._output = tree, [tuple(x.stride()) for x in outputs], containers.edits()
        except Exception as exc:
            self._give_up(exc)
        self._nodes.clear()


class _Reads(TorchFunctionMode):
    """Sees values that Python reads without an operation, as `tolist` does."""

    def __init__(self, trace: LiveTrace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if value_read(func, args, kwargs) is not None:
            self._trace.note_read()
        return func(*args, **kwargs)


class _RecordingMode(ProxyTorchDispatchMode):
    """Sees each operation before autograd and autocast. Torch accepts only this class of modes there."""

    def __init__(self, note: Callable[..., None]) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # otherwise Python implementations of operations would replace those that run without this mode
        with torch._C._DisablePythonDispatcher():
            result = func(*args, **kwargs)
            self._note(func, args, kwargs, result)
        return result

    def __enter__(self) -> Any:
        return TorchDispatchMode.__enter__(self)

    def __exit__(self, *exc: Any) -> Any:
        return TorchDispatchMode.__exit__(self, *exc)
