"""Names the layer whose quantised weights a forward reads, and the library that quantised it.

Quantisation libraries keep weights in classes derived from `torch.Tensor`, in objects of torch's C++ code, or as
integers of a layer of theirs. A plan cannot follow the first two. What they have in common is the package of a class.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from sfast_ext import reasons
from sfast_ext.reasons import Reason
from sfast_ext.weights.original_layout import is_plain, memory_of

_SPEAKING = re.compile(r"quant|qlinear|qconv|gptq|awq|hqq|bitsandbytes|bnb|nunchaku|svdq|marlin|gguf|torchao|eetq")
"""In the name of a layer's class, or of its module."""

_PLAIN = ("Tensor", "Parameter", "Buffer", "FakeTensor")
# integers and float8; an embedding of positions has int64
_NARROW = frozenset(
    getattr(torch, name)
    for name in ("int8", "uint8", "int16", "int32", "uint4", "int4", "float8_e4m3fn", "float8_e5m2", "quint8", "qint8")
    if hasattr(torch, name)
)
_MAX_DEPTH = 3


def reading(root: nn.Module, read: Any) -> Reason | None:
    """The reason if what a forward read, a tensor or another object, is in a quantised layer of `root`."""
    weights = [(path, module, value) for path, module in root.named_modules() for value in _held(module)]
    # a fake tensor stands for one without a name
    alike = isinstance(read, FakeTensor)
    for path, module, value in weights:
        found = _looks_like(value, read) if alike else _contains(value, read)
        if found and (reason := layer_reason(path, module, value)):
            return reason
    return None


def raising(root: nn.Module, traceback: TracebackType | None) -> Reason | None:
    """The reason if the forward of a quantised layer of `root` raised."""
    paths = {id(module): path for path, module in root.named_modules()}
    inner: list[nn.Module] = []
    while traceback is not None:
        called = traceback.tb_frame.f_locals.get("self")
        if id(called) in paths and isinstance(called, nn.Module):
            inner.append(called)
        traceback = traceback.tb_next
    for module in reversed(inner):
        for value in _held(module):
            if reason := layer_reason(paths[id(module)], module, value):
                return reason
        if next(module.children(), None) is not None:
            # only its blocks are around the layer that raised
            break
    return None


def layer_reason(path: str, module: nn.Module, value: Any) -> Reason | None:
    library = _library(module, value)
    if library is None:
        return None
    # torch.ao keeps the weights of a layer in a separate module
    path = path.removesuffix("._packed_params")
    return reasons.QUANTISED_LAYER(path or type(module).__name__, f"{library}{_format(module, value)}")


def _format(module: nn.Module, value: Any) -> str:
    """The format of a weight in the words of its file or of its library, if one of them says it."""
    names = getattr(module, "quant_format", None), getattr(value, "_layout_cls", None)
    return next((f" ({name})" for name in names if isinstance(name, str)), "")


def _library(module: nn.Module, value: Any) -> str | None:
    """The library that quantised a weight of a module. None if it looks like none."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        home = kind.__module__
        if kind.__name__ not in _PLAIN or home.partition(".")[0] != "torch":
            return _package(home)
        if not value.is_quantized and value.dtype not in _NARROW and not _speaks(module):
            return None
    elif not isinstance(value, torch._C.ScriptObject):
        return None
    return _package(type(module).__module__)


def _speaks(module: nn.Module) -> bool:
    return bool(_SPEAKING.search(f"{type(module).__module__}.{type(module).__qualname__}".lower()))


def _package(home: str) -> str:
    """The name of a package as users know it."""
    parts = home.split(".")
    outer = sys.modules.get(parts[0])
    if parts[0] == "torch":
        return ".".join(parts[:2])
    # several libraries share a namespace; diffusers and hosts hold several kinds
    shared = getattr(outer, "__file__", None) is None or parts[0] in ("diffusers", "transformers", "modules", "backend")
    if parts[0] == "diffusers" and "quantizers" in parts[:-1]:
        return f"diffusers ({parts[parts.index('quantizers') + 1]})"
    return ".".join(parts[:2]) if shared and len(parts) > 1 else parts[0]


def _held(module: nn.Module) -> Iterator[Any]:
    """Tensors, and objects of torch's C++ code, in a module."""
    for container in (module._parameters, module._buffers, module.__dict__):
        for value in list(container.values()):
            if isinstance(value, (torch.Tensor, torch._C.ScriptObject)):
                yield value


def _contains(value: Any, read: Any, depth: int = 0) -> bool:
    """Whether `read` is a value, on its memory, or one of the tensors that it is made of."""
    if value is read:
        return True
    if isinstance(value, torch._C.ScriptObject) or not isinstance(read, torch.Tensor):
        # Python may have several objects for one of these
        return isinstance(read, torch._C.ScriptObject) and isinstance(value, torch._C.ScriptObject)
    if _memory(value) == (memory := _memory(read)) and memory is not None:
        return True
    if depth == _MAX_DEPTH or type(value).__module__.startswith("torch.nn"):
        return False
    held = list(getattr(value, "__dict__", {}).values())
    # scales may be in an object of parameters
    held += [each for other in held for each in getattr(other, "__dict__", {}).values()]
    return any(_contains(each, read, depth + 1) for each in held if isinstance(each, torch.Tensor))


def _looks_like(value: Any, read: torch.Tensor) -> bool:
    same = isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (read.shape, read.dtype)
    return same and not is_plain(value)


def _memory(tensor: torch.Tensor) -> int | None:
    try:
        memory = memory_of(tensor)
        return memory if tensor.data_ptr() else None
    except Exception:
        # a tensor of another class may have none
        return None
