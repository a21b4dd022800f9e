"""Every algorithm that cuBLASLt has for a linear layer, by ctypes (https://docs.nvidia.com/cuda/cublas/#cublaslt).

Its heuristics name only kernels for the GPU's own generation; the algorithms themselves are older ones too.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from ctypes import byref, c_float, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

_FLOAT, _HALF, _COMPUTE_FLOAT = 0, 2, 68
_TYPES = _COMPUTE_FLOAT, _FLOAT, *[_HALF] * 4
_TRANSPOSED = 1
_DESC_TRANSA = 3
_CAP_SPLIT_K, _CAP_SWIZZLE, _CAP_TILES, _CAP_STAGES = 0, 2, 6, 13
_TILE, _SPLIT_K, _REDUCTION, _SWIZZLE, _STAGES = 1, 2, 3, 4, 6
_REDUCTION_IN_FLOAT = 2
_MOST_ALGORITHMS, _MOST_VALUES = 256, 512
_SPLITS = (1, 2, 4)
WORKSPACE = 64 << 20
"""Bytes that an algorithm may use beside its operands."""


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _Checked(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class Configuration(NamedTuple):
    """One way to compute the product: an algorithm with its tile, stages, parts of K and order of blocks."""

    algorithm: int
    tile: int
    stages: int
    split_k: int
    swizzle: int


class Failed(RuntimeError):
    """cuBLASLt returned an error."""


@functools.lru_cache(maxsize=None)
def _library() -> ctypes.CDLL:
    """The cuBLASLt that torch has loaded."""
    torch.ones(1, 1, device="cuda").mm(torch.ones(1, 1, device="cuda"))
    return ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}")


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_library(), name)(*arguments)
    if code:
        raise Failed(f"{name} returned {code}")


class Linear:
    """out (M, N) = a (M, K) b (N, K)^T in float16 with sums in float32, by an algorithm that is named.

    Args:
        a, b, out: contiguous, on one GPU.
    """

    def __init__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        self._operands = b, a, out
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=a.device)
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self._handle, self._product = c_void_p(), c_void_p()
        _call("cublasLtCreate", byref(self._handle))
        _call("cublasLtMatmulDescCreate", byref(self._product), _COMPUTE_FLOAT, _FLOAT)
        # cuBLAS's matrices have their columns one after another: it computes out^T = b a^T
        transposed = c_int32(_TRANSPOSED)
        _call("cublasLtMatmulDescSetAttribute", self._product, _DESC_TRANSA, byref(transposed), c_size_t(4))
        self._layouts = [self._layout(x) for x in self._operands]

    @staticmethod
    def _layout(x: Tensor) -> c_void_p:
        found = c_void_p()
        rows, columns = x.shape[1], x.shape[0]
        _call(
            "cublasLtMatrixLayoutCreate", byref(found), _HALF, c_uint64(rows), c_uint64(columns), ctypes.c_int64(rows)
        )
        return found

    def configurations(self) -> Iterator[Configuration]:
        """Those that can compute the product, of one part of K first."""
        found, count = (c_int * _MOST_ALGORITHMS)(), c_int()
        _call("cublasLtMatmulAlgoGetIds", self._handle, *_TYPES, _MOST_ALGORITHMS, found, byref(count))
        for number in found[: count.value]:
            algorithm = self._algorithm(number)
            splits = _SPLITS if self._capability(algorithm, _CAP_SPLIT_K)[0] else (1,)
            swizzles = range(2 if self._capability(algorithm, _CAP_SWIZZLE)[0] else 1)
            for split_k in splits:
                for tile in self._capability(algorithm, _CAP_TILES, _MOST_VALUES) or [0]:
                    for stages in self._capability(algorithm, _CAP_STAGES, _MOST_VALUES) or [0]:
                        for swizzle in swizzles:
                            each = Configuration(number, tile, stages, split_k, swizzle)
                            if self._checked(each) is not None:
                                yield each

    def _algorithm(self, number: int) -> _Algorithm:
        found = _Algorithm()
        _call("cublasLtMatmulAlgoInit", self._handle, *_TYPES, number, byref(found))
        return found

    @staticmethod
    def _capability(algorithm: _Algorithm, which: int, most: int = 1) -> list[int]:
        found, written = (c_uint32 * most)(), c_size_t()
        size = c_size_t(ctypes.sizeof(found))
        code = _library().cublasLtMatmulAlgoCapGetAttribute(byref(algorithm), which, found, size, byref(written))
        return [] if code else list(found[: max(written.value // 4, 1)])

    def _checked(self, configuration: Configuration) -> _Algorithm | None:
        """The algorithm so configured; None where it does not take the operands."""
        algorithm = self._algorithm(configuration.algorithm)
        values = {_TILE: configuration.tile, _STAGES: configuration.stages, _SPLIT_K: configuration.split_k}
        values |= {_SWIZZLE: configuration.swizzle}
        values |= {_REDUCTION: _REDUCTION_IN_FLOAT if configuration.split_k > 1 else 0}
        for which, value in values.items():
            held = c_uint32(value)
            _library().cublasLtMatmulAlgoConfigSetAttribute(byref(algorithm), which, byref(held), c_size_t(4))
        result = _Checked()
        b, a, out = self._layouts
        code = _library().cublasLtMatmulAlgoCheck(
            self._handle, self._product, b, a, out, out, byref(algorithm), byref(result)
        )
        return algorithm if code == 0 and result.state == 0 and result.workspace <= WORKSPACE else None

    def run(self, configuration: Configuration) -> None:
        """Compute the product on the current stream.

        Raises:
            Failed: the algorithm does not take the operands, or fails.
        """
        algorithm = self._checked(configuration)
        if algorithm is None:
            raise Failed(f"{configuration} does not take the operands")
        b, a, out = (c_void_p(x.data_ptr()) for x in self._operands)
        of_b, of_a, of_out = self._layouts
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        workspace = c_void_p(self._workspace.data_ptr())
        _call(
            "cublasLtMatmul", self._handle, self._product, byref(self._one), b, of_b, a, of_a, byref(self._zero),
            out, of_out, out, of_out, byref(algorithm), workspace, c_size_t(WORKSPACE), stream,
        )  # fmt: skip
