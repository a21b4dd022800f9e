"""The CUDA driver API, as far as it is needed, by ctypes (https://docs.nvidia.com/cuda/cuda-driver-api/).

Functions, structures and constants have their names in C. A function returns what it has for a result, and raises if
the driver returns an error.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

CU_DEVICE_ATTRIBUTE_CLOCK_RATE = 13
CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH = 36, 37
CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1
CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
CU_GRAPH_NODE_TYPE_KERNEL = 0
CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6
CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 0, 6, 9
CU_TENSOR_MAP_INTERLEAVE_NONE = 0
CU_TENSOR_MAP_SWIZZLE_32B, CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B = 1, 2, 3
CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3
CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0

_TENSOR_MAP_BYTES, _TENSOR_MAP_ALIGNMENT = 128, 64


class Unavailable(RuntimeError):
    """A kernel in CUDA C++ cannot be compiled, loaded or launched here; the message is the driver's or compiler's."""


class CUDA_KERNEL_NODE_PARAMS(Structure):
    """Version 2, of CUDA 12; in version 1 the last two are missing."""

    _fields_ = [
        ("func", c_void_p),
        ("gridDimX", c_uint),
        ("gridDimY", c_uint),
        ("gridDimZ", c_uint),
        ("blockDimX", c_uint),
        ("blockDimY", c_uint),
        ("blockDimZ", c_uint),
        ("sharedMemBytes", c_uint),
        ("kernelParams", c_void_p),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    ]


class CUlaunchAttribute(Structure):
    """`value` is a union; its first member here is programmaticStreamSerializationAllowed."""

    _fields_ = [("id", c_int), ("pad", c_char * 4), ("value", c_int * 16)]


class CUlaunchConfig(Structure):
    """The configuration of cuLaunchKernelEx."""

    _fields_ = [
        ("gridDimX", c_uint),
        ("gridDimY", c_uint),
        ("gridDimZ", c_uint),
        ("blockDimX", c_uint),
        ("blockDimY", c_uint),
        ("blockDimZ", c_uint),
        ("sharedMemBytes", c_uint),
        ("hStream", c_void_p),
        ("attrs", POINTER(CUlaunchAttribute)),
        ("numAttrs", c_uint),
    ]


_INT, _HANDLE = POINTER(c_int), POINTER(c_void_p)
_LAUNCH = (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p)
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDriverGetVersion": (_INT,),
    "cuDeviceGet": (_INT, c_int),
    "cuDevicePrimaryCtxRetain": (_HANDLE, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuModuleLoadData": (_HANDLE, c_char_p),
    "cuModuleGetFunction": (_HANDLE, c_void_p, c_char_p),
    "cuDeviceGetAttribute": (_INT, c_int, c_int),
    "cuFuncGetAttribute": (_INT, c_int, c_void_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuLaunchKernel": _LAUNCH,
    "cuGraphGetRootNodes": (c_void_p, _HANDLE, POINTER(c_size_t)),
    "cuGraphNodeGetType": (c_void_p, _INT),
}
_OPTIONAL: dict[str, tuple[Any, ...]] = {
    "cuLaunchKernelEx": (POINTER(CUlaunchConfig), c_void_p, c_void_p, c_void_p),
    "cuTensorMapEncodeTiled": (
        c_void_p, c_int, c_uint32, c_void_p, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_uint32),
        POINTER(c_uint32), c_int, c_int, c_int, c_int,
    ),
    "cuGraphKernelNodeGetParams_v2": (c_void_p, POINTER(CUDA_KERNEL_NODE_PARAMS)),
    "cuGraphKernelNodeGetParams": (c_void_p, POINTER(CUDA_KERNEL_NODE_PARAMS)),
    "cuGraphExecKernelNodeSetParams_v2": (c_void_p, c_void_p, POINTER(CUDA_KERNEL_NODE_PARAMS)),
    "cuGraphExecKernelNodeSetParams": (c_void_p, c_void_p, POINTER(CUDA_KERNEL_NODE_PARAMS)),
}  # fmt: skip
"""Of CUDA 12, or one of two versions; a driver without one raises when it is called."""


class Driver:
    """The driver API in a loaded library.

    Raises:
        AttributeError: the library lacks a function.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, arguments in _FUNCTIONS.items():
            getattr(library, name).argtypes = arguments
        for name, arguments in _OPTIONAL.items():
            if hasattr(library, name):
                getattr(library, name).argtypes = arguments
        newest = "_v2" if hasattr(library, "cuGraphKernelNodeGetParams_v2") else ""
        self._node_params = f"cuGraphKernelNodeGetParams{newest}"
        self._set_node_params = f"cuGraphExecKernelNodeSetParams{newest}"

    def cuDriverGetVersion(self) -> int:
        """1000 times the major version of CUDA and 10 times the minor one."""
        found = c_int()
        self._call("cuDriverGetVersion", byref(found))
        return found.value

    def cuDeviceGet(self, ordinal: int) -> int:
        """The device of an ordinal."""
        found = c_int()
        self._call("cuDeviceGet", byref(found), ordinal)
        return found.value

    def cuDevicePrimaryCtxRetain(self, device: int) -> int:
        """The primary context of a device."""
        return self._handle("cuDevicePrimaryCtxRetain", device)

    def cuCtxSetCurrent(self, context: int) -> None:
        """Make a context current in this thread."""
        self._call("cuCtxSetCurrent", context)

    def cuModuleLoadData(self, image: bytes) -> int:
        """The module of a cubin."""
        return self._handle("cuModuleLoadData", image)

    def cuModuleGetFunction(self, module: int, name: bytes) -> int:
        """A kernel of a module."""
        return self._handle("cuModuleGetFunction", module, name)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> int:
        """An attribute of a device."""
        found = c_int()
        self._call("cuDeviceGetAttribute", byref(found), attribute, device)
        return found.value

    def cuFuncGetAttribute(self, attribute: int, function: int) -> int:
        """An attribute of a kernel."""
        found = c_int()
        self._call("cuFuncGetAttribute", byref(found), attribute, function)
        return found.value

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> None:
        """Set an attribute of a kernel."""
        self._call("cuFuncSetAttribute", function, attribute, value)

    def cuLaunchKernel(
        self, function: int, grid: Sequence[int], block: Sequence[int], shared: int, stream: int, parameters: int
    ) -> None:
        """Launch a kernel. `parameters` is the address of a table of addresses."""
        code = self._library.cuLaunchKernel(function, *grid, *block, shared, stream, parameters, None)
        if code:
            raise self._error("cuLaunchKernel", code)

    def cuLaunchKernelEx(self, config: CUlaunchConfig, function: int, parameters: int) -> None:
        """Launch a kernel with attributes."""
        code = self._library.cuLaunchKernelEx(byref(config), function, parameters, None)
        if code:
            raise self._error("cuLaunchKernelEx", code)

    def cuTensorMapEncodeTiled(
        self,
        data_type: int,
        address: int,
        sizes: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzle: int,
    ) -> Any:
        """A tensor map of TMA, as a ctypes object: not interleaved, with element strides of 1, zeros out of bounds."""
        rank = len(sizes)
        memory = (c_char * (_TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT))()
        offset = -ctypes.addressof(memory) % _TENSOR_MAP_ALIGNMENT
        found = (c_char * _TENSOR_MAP_BYTES).from_buffer(memory, offset)
        self._call(
            "cuTensorMapEncodeTiled", ctypes.addressof(found), data_type, rank, address, (c_uint64 * rank)(*sizes),
            (c_uint64 * max(rank - 1, 1))(*strides), (c_uint32 * rank)(*box), (c_uint32 * rank)(*[1] * rank),
            CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )  # fmt: skip
        return found

    def cuGraphGetRootNodes(self, graph: int) -> list[int]:
        """The nodes of a graph that depend on none."""
        count = c_size_t()
        self._call("cuGraphGetRootNodes", graph, None, byref(count))
        nodes = (c_void_p * max(count.value, 1))()
        self._call("cuGraphGetRootNodes", graph, nodes, byref(count))
        return [int(node or 0) for node in nodes[: count.value]]

    def cuGraphNodeGetType(self, node: int) -> int:
        """CU_GRAPH_NODE_TYPE_KERNEL for a kernel's."""
        found = c_int()
        self._call("cuGraphNodeGetType", node, byref(found))
        return found.value

    def cuGraphKernelNodeGetParams(self, node: int) -> CUDA_KERNEL_NODE_PARAMS:
        """The parameters of a kernel's node."""
        found = CUDA_KERNEL_NODE_PARAMS()
        self._call(self._node_params, node, byref(found))
        return found

    def cuGraphExecKernelNodeSetParams(self, executable: int, node: int, params: CUDA_KERNEL_NODE_PARAMS) -> None:
        """Set the parameters of a kernel's node in an instance of its graph."""
        self._call(self._set_node_params, executable, node, byref(params))

    def _handle(self, name: str, *arguments: Any) -> int:
        found = c_void_p()
        self._call(name, byref(found), *arguments)
        return int(found.value or 0)

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise Unavailable(f"the driver has no {name}: it is too old")
        code = function(*arguments)
        if code:
            raise self._error(name, code)

    def _error(self, name: str, code: int) -> Unavailable:
        text = c_char_p()
        self._library.cuGetErrorName(code, byref(text))
        return Unavailable(f"{name}: {(text.value or b'error %d' % code).decode(errors='replace')}")
