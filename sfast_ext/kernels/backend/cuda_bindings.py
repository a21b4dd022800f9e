"""NVIDIA's Python bindings (package cuda-bindings): the CUDA driver and NVRTC."""

from __future__ import annotations

import functools
import importlib
from typing import Any


class Unavailable(RuntimeError):
    """A CUDA C++ kernel cannot be compiled, loaded or launched here; the message is the driver's or compiler's."""


@functools.lru_cache(maxsize=None)
def bindings() -> tuple[Any, Any] | None:
    """Modules (driver, nvrtc) of cuda.bindings; None where they are not installed or do not load."""
    try:
        return importlib.import_module("cuda.bindings.driver"), importlib.import_module("cuda.bindings.nvrtc")
    except Exception:  # a broken installation raises anything
        return None


def checked(result: tuple[Any, ...]) -> Any:
    """The values a call of the bindings returned beside its error code: one, or a list of several.

    Raises:
        Unavailable: the error code is not 0.
    """
    error, *values = result
    if int(error):
        raise Unavailable(f"{type(error).__name__}.{getattr(error, 'name', error)}")
    return values[0] if len(values) == 1 else values
