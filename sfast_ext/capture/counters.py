"""Objects whose state is not in attributes: iterators, generators of random numbers, arrays, buffers."""

from __future__ import annotations

import array
import contextvars
import io
import itertools
import operator
import pickle
import random
import sys
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from types import GeneratorType, ModuleType
from typing import Any

import torch

# larger arrays are told apart by a checksum, and cannot be put back
_KEPT_BYTES = 1 << 20
_MAX_BYTES = 1 << 26


def reader(value: Any) -> Callable[[Any], Any] | None:
    """What reads the state of an object. None if its state is in its attributes."""
    if isinstance(value, (bytearray, array.array)):
        return bytes
    if isinstance(value, contextvars.ContextVar):
        return _of_variable
    if isinstance(value, torch.Generator):
        return _of_generator
    if isinstance(value, random.Random):
        return random.Random.getstate
    if isinstance(value, (io.StringIO, io.BytesIO)):
        return _of_buffer
    if isinstance(value, GeneratorType):
        return _of_coroutine
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, numpy.ndarray):
            return _of_array
        if isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
            return _of_numpy_random
    if isinstance(value, Iterator) and not hasattr(value, "__dict__"):
        return _of_iterator
    return _of_queue if type(value).__name__ == "SimpleQueue" else None


def within(value: Any) -> Iterable[Any]:
    """What such an object holds."""
    if isinstance(value, contextvars.ContextVar):
        return [value.get(None)]
    if isinstance(value, GeneratorType) and value.gi_frame is not None:
        return list(value.gi_frame.f_locals.values())
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        return list(value.flat)
    return ()


def put_back(value: Any, was: Any) -> bool:
    """Give an object the state that was read of it. False if that is not possible."""
    if isinstance(value, (bytearray, array.array)) and len(bytes(value)) == len(was):
        memoryview(value).cast("B")[:] = was
    elif isinstance(value, contextvars.ContextVar):
        value.set(was[0] if was else None)
    elif isinstance(value, torch.Generator):
        value.set_state(torch.frombuffer(bytearray(was), dtype=torch.uint8))
    elif isinstance(value, random.Random):
        value.setstate(was)
    elif hasattr(value, "cache_clear"):
        value.cache_clear()
    else:
        numpy = sys.modules.get("numpy")
        kept = numpy is not None and isinstance(value, numpy.ndarray) and isinstance(was[1], (bytes, tuple))
        if not kept or value.shape != was[0] or not value.flags.writeable:
            return False
        assert numpy is not None
        items = list(was[1]) if isinstance(was[1], tuple) else numpy.frombuffer(was[1], value.dtype)
        value[...] = numpy.array(items, dtype=value.dtype).reshape(value.shape)
    return True


def generators_of(module: ModuleType, names: Collection[str]) -> list[Any]:
    """The generators of random numbers that functions of a module draw from."""
    if module is random:
        return [random._inst]  # type: ignore[attr-defined]
    numpy = sys.modules.get("numpy")
    drawn = numpy is not None and (module is numpy and "random" in names or module is numpy.random)
    return [numpy.random.mtrand._rand] if drawn and numpy is not None else []


def of_cache(cached: Any) -> Any:
    """The state of a cache: how many results were computed for it."""
    return cached.cache_info().misses


def _of_variable(variable: contextvars.ContextVar[Any]) -> Any:
    nothing = object()
    found = variable.get(nothing)
    return () if found is nothing else (found,)


def _of_generator(generator: torch.Generator) -> bytes:
    return bytes(generator.get_state().numpy())


def _of_buffer(buffer: Any) -> Any:
    return None if buffer.closed else (buffer.tell(), buffer.getvalue())


def _of_coroutine(generator: GeneratorType[Any, Any, Any]) -> Any:
    frame = generator.gi_frame
    return None if frame is None else (frame.f_lasti, tuple(frame.f_locals.values()))


def _of_array(values: Any) -> Any:
    if values.dtype.hasobject:
        return values.shape, tuple(values.flat)
    if values.nbytes <= _KEPT_BYTES:
        return values.shape, values.tobytes()
    return values.shape, zlib.crc32(values.tobytes()) if values.nbytes <= _MAX_BYTES else 0


def _of_numpy_random(generator: Any) -> bytes:
    own = getattr(generator, "bit_generator", None)
    return pickle.dumps(generator.get_state() if own is None else own.state)


def _of_queue(queue: Any) -> Any:
    return queue.qsize()


def _of_iterator(iterator: Any) -> Any:
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    return operator.length_hint(iterator, -1), _reduced(iterator, 3)


def _reduced(value: Any, deepest: int) -> Any:
    """What copying an iterator would copy, with numbers in place of objects."""
    if isinstance(value, (list, tuple)):
        return len(value), tuple(_reduced(each, deepest - 1) for each in value) if len(value) < 8 and deepest else ()
    if isinstance(value, (int, str)):
        return value
    if not isinstance(value, Iterator) or not deepest:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return operator.length_hint(value, -1), _reduced(value.__reduce__(), deepest - 1)  # type: ignore[arg-type]
    except Exception:
        return operator.length_hint(value, -1)
