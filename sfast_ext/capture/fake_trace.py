"""`make_fx` under fake tensors, without its repeated work for the thousand weights of a UNet.

The graph equals that of plain make_fx, node for node. Saved are the meta computation of an operation on shapes that
were seen before in this process, a fake tensor for each weight, and a linear search for the name of each weight. This
depends on internals of torch. If they are not as expected, plain make_fx is used.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import Parameter

from sfast_ext.call_signature import numerical_flags
from sfast_ext.capture import block_reuse, device_guard, foreign_ops, imports, quick_record
from sfast_ext.capture.interception import intercepted
from sfast_ext.capture.known_values import KnownValues
from sfast_ext.capture.real_tensors import LIFTS, READS, RealTensors
from sfast_ext.report import breathe, logger
from sfast_ext.weights.inner_tensors import ids_within

try:
    from torch._subclasses.fake_tensor import in_kernel_invocation_manager as _as_meta
except ImportError:
    _as_meta = None
try:
    # code of a graph is generated on demand, not after each change
    from torch.fx._lazy_graph_module import _use_lazy_graph_module as _lazily
except ImportError:
    _lazily = None

aten = torch.ops.aten
_DATA = {*READS, torch.Tag.inplace_view}
PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
# results of meta computations, by the settings of torch that they may depend on, see `_settings`
_memos: dict[Any, dict[Any, Any]] = {}
# of a UNet's size some 400 are new; more are forgotten together before the next capture
MAX_REMEMBERED = 20_000
# the frame of make_fx that has the tracer is at most this many callers above the recorded function
_NEAR = 6


def record(
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    root: nn.Module | None = None,
    ignored: frozenset[str] = frozenset(),
    path_of: Callable[[torch.Tensor], str | None] = lambda tensor: None,
    made: list[weakref.ref[FakeTensor]] | None = None,
    known: frozenset[int] | None = None,
) -> fx.GraphModule:
    """Run `function` on fake tensors in place of `inputs`, and record its operations before autocast.

    The attributes of the graph are the tensor objects that the function read. Exceptions of the function are passed on.

    Args:
        root: a module whose submodules `function` calls. Equal ones are recorded once, see `block_reuse`.
        ignored: see `Hooks.ignored`.
        path_of: the path of a weight; None for another tensor.
        made: takes references to the fake tensors that the function gets.
        known: the places of inputs whose values may be read; None: no values are followed.

    Raises:
        ReadsArguments: it reads what follows from other inputs.
        NotOurs: it does what may not be done with real tensors, see `real_tensors`, or calls what cannot be recorded.
    """

    def real() -> RealTensors:
        values = None if known is None else KnownValues(inputs, known)
        return RealTensors(path_of, [] if made is None else made, values, ids_within(root))

    try:
        return _record(function, inputs, root, ignored, real(), quick=True)
    except (block_reuse.ReuseFailed, quick_record.QuickFailed):
        logger.debug("making use of what was recorded failed", exc_info=True)
    return _record(function, inputs, None, ignored, real(), quick=False)


def _record(
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    root: nn.Module | None,
    ignored: frozenset[str],
    real: RealTensors,
    quick: bool,
) -> fx.GraphModule:
    def recorded(*leaves: torch.Tensor) -> Sequence[torch.Tensor]:
        tracer = _tracer(sys._getframe(1))
        if tracer is None:
            with real.watching(None):
                return function(*leaves)
        _name_weights(tracer, mode)
        quickly = quick_record.quickly(tracer, mode) if quick else contextlib.nullcontext()
        blocks = contextlib.nullcontext() if root is None else block_reuse.reuse_blocks(root, ignored, tracer)
        with real.watching(tracer), quickly, blocks:
            return function(*leaves)

    # a first import under a fake mode would leave fake tensors in its modules
    import torch._dynamo  # noqa: F401

    mode = fake_mode()
    if mode is not None:
        mode.real = real
    lazily = _lazily(True) if _lazily is not None else contextlib.nullcontext()
    modes = mode if mode is not None else contextlib.nullcontext()
    try:
        with lazily, modes, foreign_ops.recorded(), _report_much_memory(), imports.in_other_thread(), _uncompiled():
            # make_fx uses the active fake mode
            return make_fx(recorded, tracing_mode="fake", pre_dispatch=True, _allow_non_fake_inputs=True)(*inputs)
    finally:
        if mode is not None:
            # weak references to the weights, for which torch.utils.swap_tensors raises
            mode.fake_tensor_converter = type(mode.fake_tensor_converter)()


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Run functions that torch.compile made as they were written, so that their operations are recorded."""
    config = torch._dynamo.config
    before = getattr(config, "error_on_nested_fx_trace", None)
    if before is None:
        yield
        return
    config.error_on_nested_fx_trace = False
    try:
        yield
    finally:
        config.error_on_nested_fx_trace = before


def _report_much_memory() -> contextlib.AbstractContextManager[None]:
    """Report 1 EiB of free memory. Hosts slice attention by free memory, and a plan would only join the slices."""
    answer = functools.partial(_free_and_total, 1 << 60)
    return intercepted({torch.cuda.mem_get_info: answer})  # type: ignore[dict-item]


def _free_and_total(size: int, original: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
    return size, size


def finish_lazy_codegen(graph_module: fx.GraphModule) -> None:
    """End lazy code generation: from now on `recompile` generates code."""
    kind: Any = type(graph_module)  # each graph module has a separate class
    if hasattr(kind, "real_recompile"):
        kind.recompile = fx.GraphModule.recompile


class _NotCacheable(Exception):
    """An argument that is not fully described by its metadata."""


class _MemoFakeMode(FakeTensorMode):
    """Computes the metadata of a result once for arguments of equal metadata. Used for one capture; what it computes
    serves later ones as well."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # torch's own cache is asked for what is unknown here alone, and keeping it costs a seventh of a capture; before
        # torch 2.5 it also truncates the storage of the base of a cached view
        self.cache_enabled = False
        self.known: dict[Any, Any] | None = _memo()
        self._made: dict[Any, FakeTensor] = {}
        self.real: RealTensors | None = None
        """Told of writes to real tensors, which are not executed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        breathe()
        kwargs = kwargs or {}
        if self.known is None or not _depends_on_metadata(func):
            if self.real is not None:
                self.real.write(func, args, kwargs)
            return self._computed(func, types, args, kwargs)
        tensors: list[torch.Tensor] = []
        try:
            key = self.key(func, args, kwargs, tensors)
            entry = self.known.get(key) if tensors else None
            if entry is not None:
                return self.replay_meta(entry, tensors)
        except _NotCacheable:
            return self._computed(func, types, args, kwargs)
        except Exception:
            # torch is not as expected: no memoization from now on
            self.known = None
            return self._computed(func, types, args, kwargs)
        result = self._computed(func, types, args, kwargs)
        entry = self.entry(result, tensors) if tensors else None
        if entry is not None and self.known is not None:
            self.known[key] = entry
        return result

    def _computed(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.real is not None:
            self.real.note_made(result)
        return result

    def memoizes(self, func: Any) -> bool:
        """Whether the metadata of an operation's result only depend on those of its arguments."""
        return _depends_on_metadata(func)

    def key(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """What calls with equal results have in common. Appends the tensors of the call to `tensors`.

        Raises:
            Exception: an argument is not described by its metadata.
        """
        return (
            func,
            torch.get_default_dtype(),
            torch.is_inference_mode_enabled(),
            self._described(args, tensors),
            self._described(tuple(kwargs.items()), tensors) if kwargs else None,
        )

    def like(self, weight: torch.Tensor) -> torch.Tensor:
        """A fake tensor with the metadata of a weight, shared by all weights with these metadata."""
        with torch._C.DisableTorchFunction():
            return self.made(weight.dtype, tuple(weight.shape), weight.stride(), 0, weight.device)

    def made(
        self, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, device: torch.device
    ) -> FakeTensor:
        """A fake tensor with these metadata, shared."""
        key = dtype, shape, stride, offset, device
        if key not in self._made:
            self._made[key] = self.fresh(*key)
        return self._made[key]

    def fresh(
        self, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, device: torch.device
    ) -> FakeTensor:
        """A new fake tensor with these metadata."""
        with _as_meta(self):
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if offset:
                reach = offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride))
                meta = torch.empty(reach, dtype=dtype, device="meta").as_strided(shape, stride, offset)
        return FakeTensor(self, meta, device)

    def _described(self, x: Any, tensors: list[torch.Tensor]) -> Any:
        kind = type(x)
        if kind is FakeTensor or kind is Parameter or kind is torch.Tensor:
            real = kind is not FakeTensor
            if not real and (x.fake_mode is not self or x.constant is not None or x._has_symbolic_sizes_strides):
                raise _NotCacheable
            if x.layout is not torch.strided or x.is_complex() or x.is_quantized:
                raise _NotCacheable
            tensors.append(x)
            device = x.device if real else x.fake_device
            return real, x.dtype, tuple(x.shape), x.stride(), x.storage_offset(), device
        if kind in PLAIN:
            return kind, x
        if isinstance(x, (list, tuple)):
            return kind, *[self._described(item, tensors) for item in x]
        raise _NotCacheable

    def entry(self, result: Any, tensors: list[torch.Tensor]) -> Any:
        """What `replay_meta` makes an equal result of. None if metadata do not describe it."""
        several = isinstance(result, (list, tuple))
        fakes = [(i, t.untyped_storage()._cdata) for i, t in enumerate(tensors) if type(t) is FakeTensor]
        parts: list[Any] = []
        for x in result if several else [result]:
            if x is None or type(x) in (int, float, bool):
                parts.append((None, x))
                continue
            if type(x) is not FakeTensor or x.fake_mode is not self or x.constant is not None:
                return None
            if x._has_symbolic_sizes_strides or x.layout is not torch.strided or x.is_complex() or x.is_quantized:
                return None
            if x.requires_grad or any(x is t for t in tensors):
                return None
            storage = x.untyped_storage()._cdata
            base = next((i for i, other in fakes if other == storage), None)
            parts.append((x.fake_device, (base, tuple(x.shape), x.stride(), x.storage_offset(), x.dtype)))
        # the dispatcher converts named tuples to tuples
        kind = (list if isinstance(result, list) else tuple) if several else None
        return kind, parts

    def replay_meta(self, entry: Any, tensors: list[torch.Tensor]) -> Any:
        """The result that an entry describes."""
        kind, parts = entry
        results: list[Any] = []
        for device, what in parts:
            if device is None:
                results.append(what)
                continue
            base, shape, stride, offset, dtype = what
            with _as_meta(self):
                if base is None:
                    meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                else:
                    meta = tensors[base].as_strided(shape, stride, offset)
            results.append(FakeTensor(self, meta, device))
        if self.real is not None:
            self.real.note_made(results)
        return results[0] if kind is None else kind(results)


def _memo() -> dict[Any, Any]:
    """What was computed before under the present settings."""
    if sum(map(len, _memos.values())) > MAX_REMEMBERED:
        _memos.clear()
    return _memos.setdefault(_settings(), {})


def _settings() -> tuple[Any, ...]:
    """What may choose between implementations, whose results differ in strides, in addition to the arguments."""
    backends = torch.backends
    cudnn_sdp = getattr(backends.cuda, "cudnn_sdp_enabled", None)  # from torch 2.5 on
    return (
        torch.get_default_dtype(),
        getattr(torch._C, "_get_mkldnn_enabled", bool)(),
        cudnn_sdp is not None and cudnn_sdp(),
        numerical_flags(),
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
    )


@functools.lru_cache(maxsize=None)
def _depends_on_metadata(func: Any) -> bool:
    """Whether an operation has no side effects, and the metadata of its result only depend on those of its
    arguments."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or func in LIFTS:
        return False
    return not func._schema.is_mutable and _DATA.isdisjoint(func.tags)


def fake_mode() -> _MemoFakeMode | None:
    """The fake mode for captures. None if torch is too old."""
    device_guard.outlive_threads()
    if _as_meta is None:
        return None
    try:
        from torch._functorch import config
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        patch: Any = contextlib.nullcontext()
        if hasattr(config, "fake_tensor_allow_unsafe_data_ptr_access"):
            patch = config.patch(fake_tensor_allow_unsafe_data_ptr_access=False)
        # torch 2.1 has no such option, and make_fx no environment for shapes that are not symbolic
        static = "static_shapes" in inspect.signature(FakeTensorMode.__init__).parameters
        shapes: dict[str, Any] = {"shape_env": ShapeEnv(), "static_shapes": True} if static else {}
        with patch:
            return _MemoFakeMode(allow_fallback_kernels=True, allow_non_fake_inputs=True, **shapes)
    except Exception:
        logger.debug("captures remember no metadata", exc_info=True)
        return None


def _tracer(frame: FrameType | None) -> fx.Tracer | None:
    """The tracer of make_fx, which has no public access: read from the frame."""
    for _ in range(_NEAR):
        if frame is None:
            return None
        found = frame.f_locals.get("tracer")
        if isinstance(found, fx.Tracer):
            return found
        frame = frame.f_back
    return None


def _name_weights(tracer: fx.Tracer, mode: _MemoFakeMode | None) -> None:
    """Let the tracer find a weight by identity. By itself it searches all parameters seen so far."""
    names: dict[int, tuple[str, torch.Tensor]] = {}
    create_arg = tracer.create_arg
    real = None if mode is None else mode.real

    def quick(a: Any) -> Any:
        if type(a) is not Parameter and (real is None or id(a) not in real.inner):
            return create_arg(a)
        # the reference keeps the id from being reused
        name, _ = names.get(id(a)) or names.setdefault(id(a), (_fresh(tracer.root, len(names)), a))
        if name not in tracer.root._parameters and name not in tracer.root.__dict__:
            setattr(tracer.root, name, a)
        if mode is None:
            return tracer.create_node("get_attr", name, (), {})
        node = fx.Tracer.create_node(tracer, "get_attr", name, (), {})
        node.meta["val"] = mode.like(a)
        return node

    tracer.create_arg = quick  # type: ignore[method-assign]


def _fresh(root: torch.nn.Module, number: int) -> str:
    while hasattr(root, f"_param_constant{number}"):
        number += 1
    return f"_param_constant{number}"
