"""Recording of an operation whose result is known from another with equal metadata.

make_fx runs each operation once more below itself, through autocast and down to fake tensors, and looks for numbers of
unknown size in all it gets: about a millisecond, most of the time of a capture. Here the node that it would create is
created, and the result that it would find is made. What is unusual is left to make_fx. This depends on internals of
torch. If they are not as expected, make_fx records everything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from sfast_ext.call_signature import autocast_mode
from sfast_ext.capture.real_tensors import OperationGuard
from sfast_ext.environment import TORCH
from sfast_ext.report import breathe

try:
    from torch._ops import _get_dispatch_mode_pre_dispatch
    from torch.fx.experimental.proxy_tensor import _ProxyTensor, set_proxy_slot
    from torch.fx.passes.shape_prop import _extract_tensor_metadata

    _PROXY = torch._C._TorchDispatchModeKey.PROXY
    _wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    _any_autocast, _depth = torch._C._is_any_autocast_enabled, torch._C._len_torch_dispatch_stack
    # before, make_fx takes operations apart first
    SUPPORTED = TORCH >= (2, 6)
except (ImportError, AttributeError):
    SUPPORTED = False


aten = torch.ops.aten


class QuickFailed(Exception):
    """Recording failed half way. The capture must be repeated without it."""


@contextlib.contextmanager
def quickly(tracer: Any, memo: Any) -> Iterator[None]:
    """Within, the recording mode of `tracer` records what is known itself.

    Args:
        memo: the fake mode of the capture, see `fake_trace`; it describes arguments, and keeps what is known.

    Raises:
        QuickFailed: a node was created, and its result could not be made.
    """
    mode = _get_dispatch_mode_pre_dispatch(_PROXY) if SUPPORTED and memo is not None else None
    plain = getattr(mode, "tracer", None) is tracer and not getattr(mode, "emulate_precision_casts", False)
    if mode is None or not plain or not isinstance(vars(mode).get("__torch_dispatch__"), OperationGuard):
        yield
        return
    guard = mode.__torch_dispatch__
    mode.__torch_dispatch__ = _QuickRecorder(guard, tracer, memo)
    try:
        yield
    finally:
        mode.__torch_dispatch__ = guard


class _QuickRecorder:
    """In the place of a recording mode's `__torch_dispatch__`."""

    def __init__(self, original: Any, tracer: Any, memo: Any) -> None:
        self._original, self._tracer, self._memo = original, tracer, memo
        self._depth = _depth()
        self._names: dict[Any, str] = {}

    def __call__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        breathe()
        tensors: list[torch.Tensor] = []
        kwargs = kwargs or {}
        try:
            key = self._key(func, args, kwargs, tensors)
            slots = [self._tracer.tensor_tracker.get(x) for x in tensors] if key is not None else []
            unusual = not slots or not all(map(_usual, tensors, slots))
            entry = None if unusual else self._memo.known.get(key) or self._derived(func, args, tensors)
        except Exception:
            # an argument that is not described by its metadata alone
            unusual = True
        if unusual:
            return self._original(func, types, args, kwargs)
        if entry is not None:
            return self._record(entry, func, args, kwargs, tensors, slots)
        last = self._tracer.graph._root._prev
        result = self._original(func, types, args, kwargs)
        entry = self._entry(func, result, tensors, last)
        if entry is not None and self._memo.known is not None:
            self._memo.known[key] = entry
        return result

    def _key(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        memo = self._memo
        # what a gradient is recorded for, or another mode sees, is more than its metadata
        if memo.known is None or torch.is_grad_enabled() or _depth() != self._depth or not memo.memoizes(func):
            return None
        described = memo.key(func, args, kwargs, tensors)
        cast = tuple([autocast_mode(x.device.type) for x in tensors]) if _any_autocast() else ()
        return "recorded", cast, described

    def _derived(self, func: Any, args: Any, tensors: list[torch.Tensor]) -> Any:
        """What `_entry` would find after a call, where that is plain; else None."""
        x = tensors[0]
        # autocast may choose another dtype
        if func not in _SHAPES or _any_autocast() or type(x) is not FakeTensor or not x.is_floating_point():
            return None
        if not x.numel() or not all(_plain(t) and t.dtype == x.dtype and t.device == x.device for t in tensors):
            return None
        shape = _SHAPES[func](args, x.shape, [t.shape for t in tensors[1:]])
        if shape is None:
            return None
        stride = _contiguous_stride(shape)
        found = None, [(x.fake_device, (None, shape, stride, 0, x.dtype))]
        return None, found, _extract_tensor_metadata(self._memo.made(x.dtype, shape, stride, 0, x.fake_device))

    def _entry(self, func: Any, result: Any, tensors: list[torch.Tensor], last: fx.Node) -> Any:
        """What to make of an equal call: the argument that is returned itself, or the metadata of the result, and
        those of the node. None if that is not all."""
        slot = self._tracer.tensor_tracker.get(result) if type(result) is FakeTensor else None
        node = self._tracer.graph._root._prev
        if slot is None or slot.constant is not None or slot.proxy.node is not node or node.target is not func:
            return None
        if node.meta.keys() != {"val", "tensor_meta"}:
            return None
        while node._prev is not last:
            node = node._prev
            if node.op != "get_attr":
                return None
        same = next((i for i, x in enumerate(tensors) if x is result), None)
        found = self._memo.entry(result, tensors if same is None else [])
        return None if found is None else (same, found, slot.proxy.node.meta["tensor_meta"])

    def _record(
        self, entry: Any, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], slots: list[Any]
    ) -> Any:
        tracer, memo = self._tracer, self._memo
        same, found, tensor_meta = entry
        try:
            left = iter(zip(tensors, slots))
            given = self._arguments(args, left), {name: self._argument(x, left) for name, x in kwargs.items()}
            name = self._names.get(func)
            if name is None:
                name = self._names[func] = tracer.graph._target_to_str(func.overloadpacket.__name__)
            node = fx.Tracer.create_node(tracer, "call_function", func, *given, name)
            result = memo.replay_meta(found, tensors) if same is None else tensors[same]
            device = result.fake_device
            val = memo.made(result.dtype, tuple(result.shape), result.stride(), result.storage_offset(), device)
            node.meta["val"], node.meta["tensor_meta"] = val, tensor_meta
            set_proxy_slot(result, tracer, _ProxyTensor(tracer.proxy(node), None))
        except Exception as exc:
            raise QuickFailed(str(exc)) from exc
        return result

    def _arguments(self, given: Any, left: Iterator[Any]) -> tuple[Any, ...]:
        return tuple([self._argument(x, left) for x in given])

    def _argument(self, x: Any, left: Iterator[Any]) -> Any:
        if isinstance(x, torch.Tensor):
            _, slot = next(left)
            return self._tracer.create_arg(x) if slot is None else slot.proxy.node
        if isinstance(x, (list, tuple)):
            found = self._arguments(x, left)
            return list(found) if isinstance(x, list) else found
        return x


Shape = Sequence[int]


def _of_group_norm(args: Any, shape: Shape, weights: list[Shape]) -> tuple[int, ...] | None:
    fits = len(shape) > 2 and shape[1] % args[1] == 0 and all(tuple(w) == (shape[1],) for w in weights)
    return tuple(shape) if fits else None


def _of_layer_norm(args: Any, shape: Shape, weights: list[Shape]) -> tuple[int, ...] | None:
    normalized = tuple(args[1])
    fits = tuple(shape[-len(normalized) :]) == normalized and all(tuple(w) == normalized for w in weights)
    return tuple(shape) if fits else None


def _of_linear(args: Any, shape: Shape, weights: list[Shape]) -> tuple[int, ...] | None:
    weight, *bias = weights
    fits = (
        len(shape) > 1 and len(weight) == 2 and weight[1] == shape[-1] and all(tuple(b) == (weight[0],) for b in bias)
    )
    return (*shape[:-1], weight[0]) if fits else None


def _of_activation(args: Any, shape: Shape, weights: list[Shape]) -> tuple[int, ...] | None:
    return tuple(shape)


# of operations with contiguous arguments, whose meta computation takes torch up to six milliseconds; None for what is
# left to torch, or refused by it
_SHAPES: dict[Any, Callable[[Any, Shape, list[Shape]], tuple[int, ...] | None]] = {
    aten.group_norm.default: _of_group_norm,
    aten.layer_norm.default: _of_layer_norm,
    aten.linear.default: _of_linear,
    aten.silu.default: _of_activation,
    aten.gelu.default: _of_activation,
}


def _plain(x: torch.Tensor) -> bool:
    """Whether a tensor is contiguous, and in no other memory format as well: of two, torch may choose either."""
    shape = x.shape
    either = len(shape) == 4 and (shape[1] == 1 or shape[2] == shape[3] == 1)
    return not either and x.stride() == _contiguous_stride(shape)


def _contiguous_stride(shape: Shape) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return tuple(reversed(stride))


def _usual(x: torch.Tensor, slot: Any) -> bool:
    """Whether a tensor is a weight or a value of the graph, and no literal whose value make_fx follows."""
    return type(x) is not FakeTensor and not _wrapped(x) if slot is None else slot.constant is None
