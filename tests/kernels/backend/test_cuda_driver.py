"""The driver's interface: structures and constants as in NVIDIA's headers, errors by name, tensor maps aligned."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from sfast_ext.kernels.backend import cuda_driver
from sfast_ext.kernels.backend.cuda_driver import Driver, Unavailable


class Function:
    """A function of the library: notes its arguments, and writes a value where the first or last of them points."""

    def __init__(self, code: int = 0, value: int = 0, place: int = 0) -> None:
        self.code, self.value, self.place, self.calls = code, value, place, []

    def __call__(self, *args):
        self.calls.append(args)
        if self.value:
            args[self.place]._obj.value = self.value
        return self.code


def library(**functions) -> SimpleNamespace:
    names = {name: Function() for name in cuda_driver._FUNCTIONS}

    def error(code, text):
        text._obj.value = b"CUDA_ERROR_INVALID_IMAGE"
        return 0

    names["cuGetErrorName"] = error
    return SimpleNamespace(**{**names, **functions})


def test_structures_and_constants_are_nvidias():
    """As NVIDIA's own bindings have them; the sizes and offsets are those of cuda.h for 64 bits."""
    assert ctypes.sizeof(cuda_driver.CUDA_KERNEL_NODE_PARAMS) == 72
    assert ctypes.sizeof(cuda_driver.CUlaunchAttribute) == 72 and cuda_driver.CUlaunchAttribute.value.offset == 8
    assert ctypes.sizeof(cuda_driver.CUlaunchConfig) == 56 and cuda_driver.CUlaunchConfig.hStream.offset == 32
    nvidias = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings to compare with")
    prefixes = {
        "CU_DEVICE_ATTRIBUTE": nvidias.CUdevice_attribute,
        "CU_FUNC_ATTRIBUTE": nvidias.CUfunction_attribute,
        "CU_GRAPH_NODE_TYPE": nvidias.CUgraphNodeType,
        "CU_LAUNCH_ATTRIBUTE": nvidias.CUlaunchAttributeID,
        "CU_TENSOR_MAP_DATA_TYPE": nvidias.CUtensorMapDataType,
        "CU_TENSOR_MAP_INTERLEAVE": nvidias.CUtensorMapInterleave,
        "CU_TENSOR_MAP_SWIZZLE": nvidias.CUtensorMapSwizzle,
        "CU_TENSOR_MAP_L2_PROMOTION": nvidias.CUtensorMapL2promotion,
        "CU_TENSOR_MAP_FLOAT_OOB_FILL": nvidias.CUtensorMapFloatOOBfill,
    }
    constants = {name: value for name, value in vars(cuda_driver).items() if name.startswith("CU_")}
    assert len(constants) >= 12
    for name, value in constants.items():
        (kind,) = [kind for prefix, kind in prefixes.items() if name.startswith(prefix)]
        assert int(getattr(kind, name)) == value, name


def test_an_error_has_its_name():
    driver = Driver(library(cuModuleLoadData=Function(code=200), cuLaunchKernel=Function(code=200)))
    with pytest.raises(Unavailable, match="^cuModuleLoadData: CUDA_ERROR_INVALID_IMAGE$"):
        driver.cuModuleLoadData(b"")
    with pytest.raises(Unavailable, match="^cuLaunchKernel: CUDA_ERROR_INVALID_IMAGE$"):
        driver.cuLaunchKernel(1, (1, 1, 1), (32, 1, 1), 0, 0, 0)


def test_values_come_back():
    driver = Driver(library(cuDriverGetVersion=Function(value=12080), cuModuleGetFunction=Function(value=0x7F)))
    assert driver.cuDriverGetVersion() == 12080 and driver.cuModuleGetFunction(1, b"kernel") == 0x7F
    assert driver.cuDeviceGetAttribute(97, 0) == 0


def test_a_driver_that_is_too_old_says_so():
    driver = Driver(library())
    with pytest.raises(Unavailable, match="no cuTensorMapEncodeTiled: it is too old"):
        driver.cuTensorMapEncodeTiled(6, 0, [64], [], [64], 3)


@pytest.mark.parametrize("newest", ["", "_v2"])
def test_the_newest_version_of_nodes_parameters_is_asked(newest):
    functions = {
        f"{name}{version}": Function()
        for name in ("cuGraphKernelNodeGetParams", "cuGraphExecKernelNodeSetParams")
        for version in {"", newest}
    }
    driver = Driver(library(**functions))
    driver.cuGraphExecKernelNodeSetParams(1, 2, driver.cuGraphKernelNodeGetParams(3))
    assert {name for name, function in functions.items() if function.calls} == {
        f"cuGraphKernelNodeGetParams{newest}", f"cuGraphExecKernelNodeSetParams{newest}"
    }  # fmt: skip


def test_a_tensor_map_lies_where_the_driver_takes_it():
    encode = Function()
    driver = Driver(library(cuTensorMapEncodeTiled=encode))
    for _ in range(5):
        found = driver.cuTensorMapEncodeTiled(9, 1 << 40, [64, 128, 2], [128, 16384], [64, 32, 1], 3)
        assert ctypes.sizeof(found) == 128 and ctypes.addressof(found) % 64 == 0
    kind, rank, address, sizes, strides, box, steps, *rest = encode.calls[-1][1:]
    assert (kind, rank, address, rest) == (9, 3, 1 << 40, [0, 3, 3, 0])
    assert [list(x) for x in (sizes, strides, box, steps)] == [[64, 128, 2], [128, 16384], [64, 32, 1], [1, 1, 1]]
