"""What a forward does with real tensors while it is recorded on fake ones: with weights, and with tensors of unknown
owner.

Their metadata may be read. Their values may not, as a plan would keep them, and nothing may be written to them. Torch
itself allows both. A literal of the forward, as torch.tensor(0.5), is a fake tensor whose value is known, and may be
read.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Container, Iterator
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from sfast_ext import reasons
from sfast_ext.call_signature import NotOurs
from sfast_ext.capture.known_values import KnownValues, real_value
from sfast_ext.weights.inner_tensors import is_made_of_others

try:
    from torch._ops import _get_dispatch_mode_pre_dispatch

    _PROXY: Any = torch._C._TorchDispatchModeKey.PROXY
except (ImportError, AttributeError):
    _get_dispatch_mode_pre_dispatch = None  # type: ignore[assignment]

aten = torch.ops.aten
LIFTS = frozenset({aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default})
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# without the tag of such operations
_UNTAGGED = frozenset({aten.tensor_split.tensor_indices_or_sections, aten.is_nonzero.default})


def _existing(owner: Any, *names: str) -> frozenset[Any]:
    found = {getattr(owner, name, None) for name in names}
    return frozenset(x for x in found if x is not None)


# of functions that copy a tensor as an operation, and read those in a list at once
_OF_LISTS = _existing(torch, "tensor", "as_tensor", "asarray") | _existing(torch.Tensor, "new_tensor")
_READERS = _existing(torch, "equal", "allclose", "is_nonzero") | _existing(
    torch.Tensor,
    "item", "tolist", "numpy", "__array__", "__dlpack__", "__float__", "__int__", "__bool__", "__index__",
    "__complex__", "__format__", "__repr__", "__str__", "__reduce_ex__", "__contains__", "equal", "allclose",
    "is_nonzero", "untyped_storage", "storage", "_typed_storage",
)  # fmt: skip
_READERS |= _existing(getattr(torch.Tensor, "__cuda_array_interface__", None), "__get__")
# reads of one tensor, of which the result is no tensor
_OF_ONE = _existing(
    torch.Tensor, "item", "tolist", "__float__", "__int__", "__bool__", "__index__", "__complex__", "is_nonzero"
) | _existing(torch, "is_nonzero")
_NUMBERS = frozenset({aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default})
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class RealTensors(TorchFunctionMode):
    """Refuses what may not be done with real tensors. Active while a forward is recorded.

    Args:
        path_of: the path of a weight; None for another tensor.
        made: takes references to the fake tensors that the forward gets.
        values: computes what follows from arguments whose content is part of the key; None if there are none.
        inner: the ids of the tensors that weights are made of.
    """

    def __init__(
        self,
        path_of: Callable[[torch.Tensor], str | None],
        made: list[weakref.ref[FakeTensor]],
        values: KnownValues | None = None,
        inner: Container[int] = (),
    ) -> None:
        super().__init__()
        self.inner = inner
        self._path_of, self._made, self._values = path_of, made, values
        self._tracer: Any = None
        self._inside = 0  # of torch's own bookkeeping
        self.refusal: NotOurs | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._inside:
            self.read(value_read(func, args, kwargs or {}))
            if func == _SET_DATA:
                self.replace_data(real_tensor_in(args[0]))
            if func in _OF_ONE and (known := self.known(args[0])) is not None:
                return real_value(func, known)
        return func(*args, **kwargs) if kwargs else func(*args)

    def note_made(self, result: Any) -> None:
        """The forward gets fake tensors."""
        for x in result if isinstance(result, (list, tuple)) else (result,):
            if type(x) is FakeTensor:
                self._made.append(weakref.ref(x))

    def read(self, tensor: torch.Tensor | None) -> None:
        """A value of a real tensor, if it is one, is about to be read."""
        if tensor is None:
            return
        path = self._path_of(tensor)
        if path is not None:
            self._refuse(NotOurs(reasons.READS_WEIGHT(path)))
        self._refuse(NotOurs(reasons.READS_NUMBER(list(tensor.shape))))

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor with the values of a fake one, which are about to be read. None if torch knows them itself, or if
        reads are not followed."""
        slot = self._tracer.tensor_tracker.get(tensor) if self._tracer is not None else None
        if self._values is None or slot is None or slot.constant is not None or type(tensor) is not FakeTensor:
            return None
        self._inside += 1
        try:
            return self._values.read(self._tracer, slot.proxy.node)
        except NotOurs as exc:
            self._refuse(exc)
        finally:
            self._inside -= 1

    def replace_data(self, tensor: torch.Tensor | None) -> None:
        """The data of a real tensor, if it is one, is about to be replaced. It would be that of a fake tensor."""
        if tensor is not None:
            path = self._path_of(tensor)
            of_tensor = reasons.REPLACES_TENSOR(list(tensor.shape))
            self._refuse(NotOurs(of_tensor if path is None else reasons.REPLACES_WEIGHT(path)))

    def write(self, func: Any, args: Any, kwargs: Any) -> None:
        """An operation is about to run, which may write to its arguments."""
        schema = getattr(func, "_schema", None)
        for i, argument in enumerate(schema.arguments if schema is not None and schema.is_mutable else ()):
            info = argument.alias_info
            if info is None or not info.is_write:
                continue
            tensor = real_tensor_in(args[i] if i < len(args) else kwargs.get(argument.name))
            if tensor is not None:
                path = self._path_of(tensor)
                of_tensor = reasons.WRITES_TENSOR(list(tensor.shape))
                self._refuse(NotOurs(of_tensor if path is None else reasons.WRITES_WEIGHT(path)))

    def _refuse(self, refusal: NotOurs) -> NoReturn:
        self.refusal = self.refusal or refusal
        raise self.refusal

    @contextlib.contextmanager
    def watching(self, tracer: Any) -> Iterator[None]:
        """Within, what `tracer` records is watched.

        Raises:
            NotOurs: the forward did what may not be done. It is raised again at the end if the forward caught it.
        """
        mode = _recording_mode(tracer)
        if mode is not None:
            self._tracer = tracer
            mode.__torch_dispatch__ = OperationGuard(mode.__torch_dispatch__, tracer, self)
        try:
            with self:
                yield
        except BaseException as exc:
            # frames that the exception went through keep the record, and fake tensors that outlive a capture are
            # searched for in the whole process
            for node in tracer.graph.nodes if tracer is not None else ():
                node.meta.clear()
            if isinstance(exc, Exception) and self.refusal is not None and exc is not self.refusal:
                raise self.refusal from exc
            raise
        finally:
            if mode is not None:
                del mode.__torch_dispatch__
            # they hold weights and inputs, and this outlives the capture
            self._tracer = self._values = None
        if self.refusal is not None:
            raise self.refusal


def _recording_mode(tracer: Any) -> Any:
    if _get_dispatch_mode_pre_dispatch is None:
        return None
    mode = _get_dispatch_mode_pre_dispatch(_PROXY)
    return mode if getattr(mode, "tracer", None) is tracer and "__torch_dispatch__" not in vars(mode) else None


class OperationGuard:
    """In the place of a recording mode's `__torch_dispatch__`."""

    def __init__(self, original: Any, tracer: Any, real: RealTensors) -> None:
        self._original, self._tracker, self._real = original, tracer.tensor_tracker, real

    def __call__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        real = self._real
        if torch.Tag.data_dependent_output in func.tags or func in _UNTAGGED:
            real.read(real_tensor_in((args, kwargs)))
        real.write(func, args, kwargs)
        if func in _NUMBERS and (known := real.known(args[0])) is not None:
            return real_value(bool if func is aten.is_nonzero.default else torch.Tensor.item, known)
        real._inside += 1
        try:
            result = self._original(func, types, args, kwargs)
        finally:
            real._inside -= 1
        if result is NotImplemented:
            return self._of_class(func, args, kwargs)
        if func not in LIFTS:
            # torch computes what follows from literals and real tensors alone
            slot = self._tracker.get(result) if type(result) is FakeTensor else None
            if slot is not None and slot.constant is not None and real_tensor_in((args, kwargs)) is not None:
                slot.constant = None
        return result

    def _of_class(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What a class makes of an operation on one of its tensors: operations on those that it is made of, which are
        recorded. Torch asks classes only after autograd, and the recording mode stands before it."""
        kind = next((type(x) for x in _leaves((args, kwargs)) if is_made_of_others(x)), None)
        if kind is None:
            return NotImplemented
        with self._original.__self__:
            return kind.__torch_dispatch__(func, (kind,), args, kwargs)


def value_read(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The first real tensor whose values a function of torch gives to Python, or reads at once. None if there is
    none, or if it does so by an operation, which a dispatch mode sees."""
    if func in _READERS:
        return real_tensor_in((args, kwargs))
    if func not in _OF_LISTS:
        return None
    data = args[1:] if func is torch.Tensor.new_tensor else args
    first = data[0] if data else kwargs.get("data", kwargs.get("obj"))
    return None if isinstance(first, torch.Tensor) else real_tensor_in(first)


def _leaves(x: Any) -> Iterator[Any]:
    items = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else None
    if items is None:
        yield x
    else:
        for item in items:
            yield from _leaves(item)


def real_tensor_in(x: Any) -> torch.Tensor | None:
    """The first real tensor in a value."""
    if isinstance(x, torch.Tensor):
        return None if isinstance(x, FakeTensor) else x
    items = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
    return next((found for item in items if (found := real_tensor_in(item)) is not None), None)
