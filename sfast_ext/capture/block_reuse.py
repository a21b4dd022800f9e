"""Equal submodules are recorded once. For a further one with an equal call, the recorded nodes are copied.

A UNet repeats a few kinds of blocks (SDXL has 70 transformer blocks of two kinds), and recording dominates the time of
a capture. This depends on internals of torch. If they are not as expected, everything is recorded.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from sfast_ext.behaviour.forward_slot import AcceleratedForward, is_own_forward
from sfast_ext.behaviour.structure import KnownCode, structure
from sfast_ext.capture.interception import intercepted
from sfast_ext.environment import TORCH
from sfast_ext.weights.inner_tensors import inner_of

try:
    from torch.fx.experimental.proxy_tensor import _ProxyTensor, get_proxy_slot, set_proxy_slot
    from torch.utils._mode_utils import no_dispatch
    from torch.utils._python_dispatch import _disable_current_modes

    SUPPORTED = True
except ImportError:
    SUPPORTED = False
# recording a module with fewer submodules is as fast as comparing it
MIN_MODULES = 5
_COPIED = "copied from an equal block"
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format)


class ReuseFailed(Exception):
    """Copying failed half way. The capture must be repeated without block reuse."""


class _NotComparable(Exception):
    """A call that cannot be compared with another one."""


@dataclass
class _Recording:
    """The record of one call: nodes, names of weights in the module, nodes of arguments and results."""

    nodes: list[fx.Node]
    weights: dict[fx.Node, str]
    arguments: list[fx.Node]
    outputs: list[tuple[fx.Node, FakeTensor]]
    tree: Any


@contextlib.contextmanager
def reuse_blocks(root: nn.Module, ignored: frozenset[str], tracer: fx.Tracer) -> Iterator[None]:
    """Within, `tracer` records equal calls of modules below `root` in this thread once.

    Args:
        ignored: attributes without influence on behaviour, see `Hooks.ignored`.

    Raises:
        ReuseFailed: copying failed half way.
    """
    if not SUPPORTED or getattr(_thread, "one_by_one", False):
        yield
        return
    reuser = _BlockReuser(ignored, tracer)
    candidates = {id(module): module for module in _candidates(root)}

    def called(call_impl: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if candidates.get(id(module)) is not module:
            return call_impl(module, *args, **kwargs)
        return reuser.call(module, functools.partial(call_impl, module), *args, **kwargs)

    # not by attributes of the modules: another thread may copy or save them meanwhile
    with intercepted({nn.Module._call_impl: called}):  # type: ignore[dict-item]
        yield


def _candidates(root: nn.Module) -> list[nn.Module]:
    sizes: dict[int, int] = {}
    _measure(root, sizes)
    fit = [
        m for m in root.modules() if m is not root and sizes[id(m)] >= MIN_MODULES and not isinstance(m, nn.ModuleList)
    ]
    kinds = Counter((type(m), sizes[id(m)]) for m in fit)
    return [m for m in fit if kinds[type(m), sizes[id(m)]] > 1 and _is_plain(m)]


def _measure(module: nn.Module, sizes: dict[int, int]) -> int:
    """Count the submodules of each module."""
    if id(module) not in sizes:
        sizes[id(module)] = 0  # ends the recursion for cyclic modules
        sizes[id(module)] = sum(1 + _measure(m, sizes) for m in module._modules.values() if m is not None)
    return sizes[id(module)]


def _is_plain(module: nn.Module) -> bool:
    """Whether a call of the module runs its class's forward, or accelerate's hook around that."""
    forward = module.__dict__.get("forward")
    plain = forward is None or is_own_forward(forward, module) or isinstance(forward, AcceleratedForward)
    hooks = any(module.__dict__.get(name) for name in ("_forward_hooks", "_forward_pre_hooks"))
    return not hooks and (plain or "_hf_hook" in module.__dict__)


class _BlockReuser:
    def __init__(self, ignored: frozenset[str], tracer: fx.Tracer) -> None:
        self._ignored = ignored | {"forward", "_old_forward"}
        self._tracer = tracer
        self._thread = threading.get_ident()
        self._recordings: dict[Hashable, _Recording | None] = {}
        self._code = KnownCode()

    def call(self, module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tracer = self._tracer
        if threading.get_ident() != self._thread:
            return inner(*args, **kwargs)
        try:
            leaves, tree = pytree.tree_flatten((args, kwargs))
            with torch._C.DisableTorchFunction():
                # otherwise make_fx sees each attribute of a tensor that is read
                key = self._kind(module), str(tree), _described(leaves)
                nodes = [_node(tracer, leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        except Exception:
            # not comparable: record
            return inner(*args, **kwargs)
        known = self._recordings.get(key)
        if known is not None:
            return _copy(known, module, tracer, nodes)
        last = next(iter(reversed(tracer.graph.nodes)))
        result = inner(*args, **kwargs)
        if key not in self._recordings:
            self._recordings[key] = _recording(module, tracer, last, nodes, leaves, result)
        return result

    def _kind(self, module: nn.Module) -> Hashable:
        # includes which weights are tied: a record names each weight by one of its paths
        numbers: dict[int, int] = {}
        weights = tuple(
            (path, name, numbers.setdefault(id(tensor), len(numbers)), *_metadata(tensor))
            for path, part in module.named_modules()
            for held in (part._parameters, part._buffers)
            for name, tensor in held.items()
            if tensor is not None
        )
        forms = tuple((path, inner.form, *map(_metadata, inner.values())) for path, inner in inner_of(module).items())
        return structure(module, self._ignored, self._code), weights, forms


def _described(leaves: list[Any]) -> Hashable:
    found: list[Hashable] = []
    storages: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, FakeTensor):
            # aliasing between arguments matters
            alias = storages.setdefault(leaf.untyped_storage()._cdata, len(storages))
            found.append((alias, *_metadata(leaf), leaf.storage_offset()))
        elif type(leaf) in _PLAIN:
            found.append((type(leaf), leaf))
        else:
            raise _NotComparable
    return tuple(found)


def _metadata(x: torch.Tensor) -> tuple[Any, ...]:
    return x.dtype, tuple(x.shape), x.stride(), x.device, type(x)


def _node(tracer: Any, x: torch.Tensor) -> fx.Node:
    slot = get_proxy_slot(x, tracer, None)
    proxy = getattr(slot, "proxy", slot)
    if not isinstance(proxy, fx.Proxy) or getattr(slot, "constant", None) is not None:
        raise _NotComparable
    return proxy.node


def _recording(
    module: nn.Module, tracer: Any, last: fx.Node, arguments: list[fx.Node], leaves: list[Any], result: Any
) -> _Recording | None:
    """The nodes of a call, which follow `last`. None if they cannot be copied: they read other values than arguments
    and weights, write to a value, or return one that is not their own."""
    names = {id(p): name for name, p in module.named_parameters()}
    names.update((id(tensor), path) for path, tensor in _inner(module).items())
    nodes, weights = [], {}
    node = last.next
    while node.op != "root":
        nodes.append(node)
        node = node.next
    inside = {*nodes, *arguments}
    for node in nodes:
        if node.op == "get_attr":
            name = names.get(id(getattr(tracer.root, str(node.target), None)))
            if name is None:
                return None
            weights[node] = name
        elif node.op != "call_function" or not inside.issuperset(node.all_input_nodes) or _writes(node.target):
            return None
    outputs, tree = pytree.tree_flatten(result)
    given = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}
    found = []
    for x in outputs:
        if not isinstance(x, FakeTensor) or x.untyped_storage()._cdata in given:
            return None
        given.add(x.untyped_storage()._cdata)
        try:
            found.append((_node(tracer, x), x))
        except _NotComparable:
            return None
    return _Recording(nodes, weights, arguments, found, tree)


def _inner(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that weights of the module are made of, by path."""
    return {f"{path}.{name}": tensor for path, inner in inner_of(module).items() for name, tensor in inner.items()}


def _writes(target: Any) -> bool:
    return bool(getattr(getattr(target, "_schema", None), "is_mutable", False))


def _copy(known: _Recording, module: nn.Module, tracer: Any, arguments: list[fx.Node]) -> Any:
    try:
        mapped = dict(zip(known.arguments, arguments))
        inner = _inner(module)
        for node in known.nodes:
            name = known.weights.get(node)
            if name is None:
                mapped[node] = copied = tracer.graph.node_copy(node, mapped.__getitem__)
                copied.meta[_COPIED] = True
            else:
                mapped[node] = tracer.create_arg(inner[name] if name in inner else module.get_parameter(name))
        results = []
        for node, like in known.outputs:
            with unrecorded():
                meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
                result = FakeTensor(like.fake_mode, meta, like.fake_device)
            # the node has its metadata from the one that was copied
            set_proxy_slot(result, tracer, _ProxyTensor(fx.Proxy(mapped[node], tracer), None))
            real = getattr(like.fake_mode, "real", None)
            if real is not None:
                real.note_made(result)
            results.append(result)
        return pytree.tree_unflatten(results, known.tree)
    except Exception as exc:
        raise ReuseFailed(str(exc)) from exc


def holds_copies(graph_module: fx.GraphModule) -> bool:
    """Whether a recorded graph has nodes that were copied."""
    return any(_COPIED in node.meta for node in graph_module.graph.nodes)


_thread = threading.local()


@contextlib.contextmanager
def one_by_one() -> Iterator[None]:
    """Within, equal blocks are recorded one by one in this thread."""
    _thread.one_by_one = True
    try:
        yield
    finally:
        _thread.one_by_one = False


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Within, no mode sees an operation."""
    if TORCH >= (2, 6):
        with _disable_current_modes():
            yield
        return
    # there the recording mode is none of the modes that can be disabled: it is above autocast
    with torch._C.DisableTorchFunction(), torch._C._DisablePythonDispatcher(), no_dispatch():
        yield
