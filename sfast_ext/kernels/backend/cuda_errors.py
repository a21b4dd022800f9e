"""The error of kernels in CUDA C++."""

from __future__ import annotations


class Unavailable(RuntimeError):
    """A kernel in CUDA C++ cannot be compiled, loaded or launched here; the message is the driver's or compiler's."""
