"""The signature of a call: what makes two calls interchangeable. Arguments become a flat list of tensors.

A call is a tree of tuples, lists, dicts and dataclasses. Its tensors are the inputs of a plan. A Python number that is
a separate argument (a timestep, the strength of a ControlNet) becomes a 0-d tensor, so that it is not baked into a
plan, and so do chosen numbers inside of other arguments, see `argument_roles.py`. All other scalars are part of
the signature.
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from sfast_ext import argument_objects, fp32_precision, reasons
from sfast_ext.argument_contents import Pending
from sfast_ext.call_words import words
from sfast_ext.reasons import Declined
from sfast_ext.torch_state import default_device, python_kernels

_CONSTANTS = frozenset({type(None), bool, str, bytes, torch.dtype, torch.device})
# before torch 2.4 there was a function for each device type
_AUTOCAST_BY_TYPE = hasattr(torch, "get_autocast_dtype")
_any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
# what torch.compile notes of a tensor
_DYNAMO = operator.methodcaller("startswith", "_dynamo")
# A tensor of up to this many elements may be on the CPU (a timestep). It is copied to the model's device.
SMALL = 64


class NotOurs(Declined):
    """The call is bypassed."""


class Signature(NamedTuple):
    """Hashable identity of a call: its tree with shapes, dtypes and memory formats, and the states of torch."""

    tree: Hashable
    mode: tuple[Any, ...]
    flags: int = 0
    """See `numerical_flags`."""
    other_mode: tuple[Any, ...] = ()
    """Autocast of the device type that the model is not on: a forward may compute a part there."""
    contents: tuple[Any, ...] = ()
    """What tensors hold that the forward reads values of, by their places among all."""
    shared: tuple[int, ...] = ()
    """If a tensor is there more than once: of each leaf the first that is the same. A forward may ask for that."""

    def words(self) -> str:
        """The signature as readable text."""
        text = ", ".join(words(self.tree, ""))
        return f"{text} under autocast {self.mode[1]}" if self.mode else text

    def joined(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Other leaves, of which those are the same that are in the call."""
        return [leaves[first] for first in self.shared] if self.shared else leaves

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of all tensors, in the order of the arguments."""
        return [shape for _, shape in _tensors(self.tree)]


@dataclass
class Call:
    """The flattened arguments of one call. `leaves` are tensors, or Python numbers that become tensors."""
    signature: Signature
    leaves: list[Any]
    tree: Any
    nested: list[Any]
    """All numbers inside of other arguments, in order."""
    inputs: frozenset[int]
    """Which of those are leaves."""
    values: frozenset[int] = frozenset()
    """The leaves whose content is part of the signature."""
    pending: Sequence[Pending] = ()
    """Contents that are to be confirmed."""

    def leaf_tensors(self) -> Iterator[torch.Tensor]:
        """The leaves that are tensors."""
        return (leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    def tensors(self, device: torch.device) -> list[torch.Tensor]:
        """The leaves as contiguous tensors on `device`. Copies only if needed."""
        return [as_tensor(leaf, device) for leaf in self.leaves]


def as_tensor(leaf: Any, device: torch.device) -> torch.Tensor:
    """A leaf as a contiguous tensor on `device`. A Python float becomes float64, not torch's default dtype: the forward
    rounds it itself."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().to(device).contiguous()
    return torch.tensor(leaf, dtype=torch.int64 if isinstance(leaf, int) else torch.float64, device=device)


def autocast_mode(device_type: str) -> tuple[Any, ...]:
    """(device type, dtype) of autocast, or () without it."""
    if _AUTOCAST_BY_TYPE:
        return (device_type, torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else ()
    if device_type == "cuda":
        return ("cuda", torch.get_autocast_gpu_dtype()) if torch.is_autocast_enabled() else ()
    return ("cpu", torch.get_autocast_cpu_dtype()) if torch.is_autocast_cpu_enabled() else ()


def _flag(name: str) -> Callable[[], Any]:
    """Reads a flag of torch; false in a version that has no such flag."""
    return getattr(torch._C, name, bool)


_half_sums = _flag("_get_cublas_allow_fp16_reduced_precision_reduction")
_bf16_sums = _flag("_get_cublas_allow_bf16_reduced_precision_reduction")
_half_accumulators = _flag("_get_cublas_allow_fp16_accumulation")
_cudnn, _cudnn_deterministic = _flag("_get_cudnn_enabled"), _flag("_get_cudnn_deterministic")
_deterministic, _mkldnn = _flag("_get_deterministic_algorithms"), _flag("_get_mkldnn_enabled")
_sdp_flash, _sdp_efficient = _flag("_get_flash_sdp_enabled"), _flag("_get_mem_efficient_sdp_enabled")
_sdp_math, _sdp_cudnn = _flag("_get_math_sdp_enabled"), _flag("_get_cudnn_sdp_enabled")
_sdp_half_sums = _flag("_get_math_sdp_allow_fp16_bf16_reduction")
_default_dtype, _default_type = torch.get_default_dtype, _flag("_get_default_device")
_raw_matmul, _raw_conv = fp32_precision.RAW
_function_modes = torch._C._len_torch_function_stack
_known_flags: dict[tuple[Any, ...], int] = {}
_last_flags: tuple[tuple[Any, ...], int] = (), 0


def numerical_flags() -> int:
    """What a program can tell torch about the tensors that a forward makes, about precision and the choice of kernels:
    default dtype and device, TF32, sums in half precision, determinism, ways to compute attention. A CUDA graph keeps
    what was chosen when it was captured.

    Returns:
        A number for each combination that there was.
    """
    global _last_flags
    # in one expression: a loop over the readers takes three times as long
    raw = (
        _default_dtype(), _default_type(), default_device() if _function_modes() else None, python_kernels.flash,
        _half_sums(), _bf16_sums(),
        _half_accumulators(), _cudnn(), _cudnn_deterministic(), _deterministic(), _mkldnn(), _sdp_flash(),
        _sdp_efficient(), _sdp_math(), _sdp_cudnn(), _sdp_half_sums(), _raw_matmul(), _raw_conv(),
    )  # fmt: skip
    last, number = _last_flags
    if raw != last:
        meant = (*raw[:-2], fp32_precision.read_matmul(), fp32_precision.read_conv())
        number = _known_flags.setdefault(meant, len(_known_flags))
        _last_flags = raw, number
    return number


def flatten_call(
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: torch.device,
    *,
    static_numbers: bool = False,
    inputs: frozenset[int] = frozenset(),
) -> Call:
    """Flatten the arguments of a call to a module on `device`.

    Args:
        static_numbers: Python numbers that are arguments of their own stay in the signature. For forwards that branch
            on them.
        inputs: the numbers inside of other arguments that become inputs, by their order in the call.

    Raises:
        NotOurs: an argument is of an unsupported type.
    """
    leaves: list[Any] = []
    nested: list[Any] = []
    numbers = static_numbers, nested, inputs
    positional = tuple([_flatten(a, leaves, device, (None, "argument {}", i), numbers) for i, a in enumerate(args)])
    named = tuple([(k, _flatten(v, leaves, device, (None, "{}", k), numbers)) for k, v in sorted(kwargs.items())])
    tree = ("call", positional, named)
    mode: tuple[Any, ...] = ()
    other_mode: tuple[Any, ...] = ()
    if _any_autocast():
        kind = device.type
        mode, other_mode = autocast_mode(kind), autocast_mode("cpu" if kind == "cuda" else "cuda")
    # equal numbers may be one object as well
    shared = _shared(leaves) if len({*map(id, leaves)}) != len(leaves) else ()
    signature = Signature(tree, mode, numerical_flags(), other_mode, (), shared)
    return Call(signature, leaves, tree, nested, inputs)


def _shared(leaves: Sequence[Any]) -> tuple[int, ...]:
    places: dict[int, int] = {}
    found = tuple(places.setdefault(id(x), i) if isinstance(x, torch.Tensor) else i for i, x in enumerate(leaves))
    return found if any(i != first for i, first in enumerate(found)) else ()


def flatten_output(output: Any) -> tuple[Any, list[torch.Tensor]]:
    """The tree of a forward's result, and its tensors.

    Raises:
        NotOurs: the result contains an unsupported type.
    """
    leaves: list[Any] = []
    return _flatten(output, leaves, None, (None, "the {}", "result"), (True, [], frozenset())), leaves


def open_numbers(signature: Signature) -> Signature:
    """The signature without values of numbers and tensors: calls that differ in nothing else have it in common."""
    return signature._replace(tree=_opened(signature.tree), contents=())


def without_sizes(signature: Signature) -> Signature:
    """The signature without the sizes of tensors."""
    return signature._replace(tree=_sizeless(signature.tree), contents=())


def tensors_alone(signature: Signature) -> Signature:
    """The signature without all that is no tensor: calls that differ in constants have it in common."""
    return signature._replace(tree=tuple(_tensors(signature.tree)), contents=())


def first_difference(one: Signature, other: Signature) -> str | None:
    """The first argument in which two calls differ, as a message names it. None if their arguments are alike."""
    found = _difference(one.tree, other.tree, "")
    if found is not None or one.contents == other.contents:
        return found
    place = next((i for i, content in one.contents if dict(other.contents).get(i) != content), 0)
    return f"the content of {next(itertools.islice(_names(one.tree, ''), place, None), 'an argument')}"


def rebuild_call(tree: Any, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse of `flatten_call`, with other leaves."""
    _, positional, named = tree
    return tuple(_rebuild(t, leaves) for t in positional), {k: _rebuild(t, leaves) for k, t in named}


def rebuild_output(tree: Any, leaves: Sequence[Any]) -> Any:
    """The inverse of `flatten_output`."""
    return _rebuild(tree, leaves)


def copied(value: Any) -> Any:
    """The lists and dicts of a value anew, with the same values in them."""
    if type(value) is list:
        return [copied(v) for v in value]
    return {k: copied(v) for k, v in value.items()} if type(value) is dict else value


# the path to a value, for messages: (path of the container, format, key)
_Where = tuple[Any, str, Any]
# whether numbers that are arguments of their own are constants, all others, and which of those are inputs
_Numbers = tuple[bool, list[Any], frozenset[int]]


def _flatten(value: Any, leaves: list[Any], device: torch.device | None, where: _Where, numbers: _Numbers) -> Any:
    kind = type(value)
    if kind is torch.Tensor:
        return _tensor(value, leaves, device, where)
    if kind in _CONSTANTS or isinstance(value, enum.Enum):
        return ("const", kind, value)
    if kind in (int, float):
        if where[0] is None:
            constant = numbers[0]
        else:
            constant = len(numbers[1]) not in numbers[2]
            numbers[1].append(value)
        if constant:
            return ("const", kind, value)
        leaves.append(value)
        return ("number", kind, len(leaves) - 1)
    if isinstance(value, torch.Tensor):
        return _tensor(value, leaves, device, where)
    if kind is tuple or kind is list:
        items = [_flatten(v, leaves, device, (where, "[{}]", i), numbers) for i, v in enumerate(value)]
        return ("list" if kind is list else "tuple", kind, tuple(items))
    if kind is dict:
        parts: Any = value.items()
    elif (parts := argument_objects.entries(value, kind)) is None:
        raise NotOurs(reasons.NO_INPUT(_path(where), f"{kind.__module__}.{kind.__qualname__}"))
    elif isinstance(value, tuple):
        items = [_flatten(v, leaves, device, (where, "[{}]", i), numbers) for i, (_, v) in enumerate(parts)]
        return ("tuple", kind, tuple(items))
    data = kind is not dict and argument_objects.is_data(kind)
    if not (data or all(isinstance(k, (str, int)) for k in value)):
        raise NotOurs(reasons.DICT_KEYS(_path(where)))
    form = ".{}" if data else "[{!r}]"
    named = [(k, _flatten(v, leaves, device, (where, form, k), numbers)) for k, v in parts]
    return ("data" if data else "dict", kind, tuple(named))


def _tensor(value: torch.Tensor, leaves: list[Any], device: torch.device | None, where: _Where) -> Any:
    # device is None for results. They are fake tensors during a capture.
    kind = type(value)
    plain = kind is torch.Tensor or kind is (FakeTensor if device is None else torch.nn.Parameter)
    if not plain or value.layout is not torch.strided or value.is_quantized:
        raise NotOurs(reasons.NOT_PLAIN(_path(where), kind.__name__, value.layout))
    if (held := value.__dict__) and kind is torch.Tensor and device is not None and not all(map(_DYNAMO, held)):
        raise NotOurs(reasons.HAS_ATTRIBUTE(_path(where), next(iter(held))))
    there = value.device
    if there != device:
        if there.type == "meta":
            raise NotOurs(reasons.ON_META(_path(where)))
        if device is not None and not (there.type == "cpu" and value.numel() <= SMALL):
            raise NotOurs(reasons.ELSEWHERE(_path(where), there, device))
    leaves.append(value)
    shape = tuple(value.shape)
    if len(shape) < 4 or device is None or value.is_contiguous():
        return ("tensor", value.dtype, shape, len(leaves) - 1)
    # results follow the memory format of inputs, such as channels-last
    order = _order_in_memory(shape, value.stride())
    return ("tensor", value.dtype, shape, *((order,) if order else ()), len(leaves) - 1)


@functools.lru_cache(maxsize=1024)
def _order_in_memory(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...] | None:
    """The dimensions of a tensor from the outermost to the innermost in memory; None if that is their own order, as of
    a slice of a contiguous tensor. Results follow the order of strides, not the strides."""
    dims = [d for d, (size, stride) in enumerate(zip(shape, strides)) if size > 1 and stride > 0]
    order = sorted(dims, key=lambda d: -strides[d])
    return tuple(order) if order != dims else None


def _path(where: _Where) -> str:
    outer, form, key = where
    return ("" if outer is None else _path(outer)) + form.format(key)


def _rebuild(tree: Any, leaves: Sequence[Any]) -> Any:
    tag, kind = tree[0], tree[1]
    if tag in ("tensor", "number"):
        return leaves[tree[-1]]
    if tag == "const":
        return tree[2]
    if tag in ("tuple", "list"):
        items = [_rebuild(t, leaves) for t in tree[2]]
        return items if kind is list else argument_objects.make_tuple(kind, items)
    entries = {key: _rebuild(t, leaves) for key, t in tree[2]}
    if kind is dict:
        return entries
    return argument_objects.make_data(kind, entries) if tag == "data" else argument_objects.make_dict(kind, entries)


def _branches(tree: Any) -> Iterator[tuple[str, Any]]:
    """The trees in a tree, with their names as in a message."""
    tag = tree[0]
    if tag == "call":
        yield from ((f"argument {i}", each) for i, each in enumerate(tree[1]))
        yield from tree[2]
    elif tag in ("tuple", "list"):
        yield from ((f"[{i}]", each) for i, each in enumerate(tree[2]))
    elif tag in ("data", "dict"):
        form = ".{}" if tag == "data" else "[{!r}]"
        yield from ((form.format(key), each) for key, each in tree[2])


def _tensors(tree: Any) -> Iterator[tuple[torch.dtype, tuple[int, ...]]]:
    if tree[0] == "tensor":
        yield tree[1], tree[2]
    for _, each in _branches(tree):
        yield from _tensors(each)


def _names(tree: Any, name: str) -> Iterator[str]:
    """The names of all tensors of a tree, as in a message."""
    if tree[0] == "tensor":
        yield name
    for part, each in _branches(tree):
        yield from _names(each, name + part)


def _opened(tree: Any) -> Any:
    tag = tree[0]
    if tag == "number" or (tag == "const" and tree[1] in (int, float)):
        return ("number", tree[1])
    if tag in ("const", "tensor"):
        return _without_number(tree)
    return (tag, None if tag == "call" else tree[1], tuple([(name, _opened(each)) for name, each in _branches(tree)]))


def _sizeless(tree: Any) -> Any:
    if isinstance(tree, tuple) and tree[:1] == ("tensor",) and isinstance(tree[1], torch.dtype):
        return "tensor", tree[1], len(tree[2])
    return tuple(map(_sizeless, tree)) if isinstance(tree, tuple) else tree


def _without_number(tree: Any) -> Any:
    """A tree without the numbers of tensors: what is as long in both of two calls."""
    return tree[:-1] if tree[0] == "tensor" else tree[:3]


def _difference(one: Any, other: Any, name: str) -> str | None:
    if _without_number(one) == _without_number(other):
        return None
    here, there = list(_branches(one)), list(_branches(other))
    if one[0] != other[0] or not here or [n for n, _ in here] != [n for n, _ in there]:
        return name or "the arguments"
    found = (_difference(a, b, name + n) for (n, a), (_, b) in zip(here, there))
    return next((place for place in found if place is not None), name or "the arguments")
