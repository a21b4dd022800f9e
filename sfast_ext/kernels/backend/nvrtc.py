"""CUDA C++ kernels of csrc, compiled by NVRTC at run time, for what Triton cannot express.

Without NVRTC the kernels are unavailable and callers fall back. Compiled kernels are kept in the user's cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfast_ext import cache_folder, freed_memory
from sfast_ext.kernels.backend import cuda_driver, launch_log, pdl, triton_runtime
from sfast_ext.kernels.backend.cuda_driver import Driver, Unavailable
from sfast_ext.kernels.backend.cuda_libraries import Bindings, bindings, no_nvrtc
from sfast_ext.kernels.backend.launch_log import AddressTable, CudaLaunch, Opaque, TensorMap
from sfast_ext.kernels.backend.nvrtc_library import Nvrtc

__all__ = ["Source", "Unavailable", "bindings"]

logger = logging.getLogger("sfast_ext")

SOURCES = Path(__file__).parents[3] / "csrc"
_SEAL = hashlib.sha256().digest_size

Prepare = Callable[..., tuple[list[Any], int, int]]
"""Maps arguments and constants of a launch to the kernel's parameters (tensors or None for addresses, ctypes numbers,
tensor maps, tables of addresses), threads per block, and bytes of dynamic shared memory."""
Variants = Callable[[dict[str, int]], Iterable[dict[str, int]]]
"""Maps constants of a launch to those that other image sizes may need, most likely first, the given ones among them."""
_MAPPED = {
    torch.float16: cuda_driver.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    torch.bfloat16: cuda_driver.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
}
# one lock per cache file: two threads compile a kernel once
_locks: dict[Path, threading.Lock] = {}
_bound = threading.local()


def folder() -> Path:
    """The cache of compiled kernels: $SFAST_CACHE_DIR, or a folder in $TORCH_EXTENSIONS_DIR or the user's cache."""
    chosen = os.environ.get("SFAST_CACHE_DIR")
    if chosen:
        return Path(chosen)
    above = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME")
    return (Path(above) if above else Path.home() / ".cache") / "sfast_ext"


def uncached() -> str | None:
    """Why compiled kernels are not cached: others can write the folder; else None."""
    return cache_folder.refusal(folder(), folder())


def architecture(index: int | None) -> str:
    """The target of a GPU, such as "sm_90a": from Hopper on with architecture-specific features."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@functools.lru_cache(maxsize=None)
def targets() -> tuple[str, tuple[int, ...]] | None:
    """NVRTC's version and the compute capabilities that it compiles for, times ten, sorted; None if it does not
    tell."""
    compiler = bindings().nvrtc
    if compiler is None:
        return None
    try:
        return ".".join(map(str, compiler.version())), tuple(sorted(compiler.architectures()))
    except Exception as exc:
        logger.debug("NVRTC does not say what it compiles for: %s", exc)
        return None


_accepted: dict[torch.device, Bindings] = {}


def unsupported(device: torch.device) -> str | None:
    """Why NVRTC cannot compile for a GPU: it is not there, or does not know the architecture; None if it can or does
    not tell, and without a GPU."""
    found = bindings()
    # asked at each launch, and torch takes as long as the launch to tell the capability
    if _accepted.get(device) is found or device.type != "cuda" or not torch.cuda.is_available():
        return None
    reason = no_nvrtc()
    if reason is not None:
        return f"{reason}, so kernels in CUDA C++ are left out"
    told = targets()
    if told is None or not told[1]:
        return None
    major, minor = torch.cuda.get_device_capability(device.index)
    version, capabilities = told
    if 10 * major + minor in capabilities:
        _accepted[device] = found
        return None
    least, most = (f"{each // 10}.{each % 10}" for each in (capabilities[0], capabilities[-1]))
    return (
        f"NVRTC {version} does not know compute capability {major}.{minor}, but {least} to {most}, so kernels in CUDA"
        " C++ are left out"
    )


def supported(device: torch.device) -> bool:
    """Whether kernels can be compiled and launched on a GPU."""
    return device.type == "cuda" and targets() is not None and unsupported(device) is None


def bind(index: int) -> None:
    """Make a GPU's primary context current in this thread: the driver API needs one, torch may not have set
    it yet."""
    if getattr(_bound, "index", None) != index:
        _use_context(index)
        _bound.index = index


def _use_context(index: int) -> Any:
    """Make a GPU's primary context, the one the CUDA runtime uses, current; returns the driver's device."""
    driver = loaded_driver()
    device = driver.cuDeviceGet(index)
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(device))
    return device


def loaded_driver() -> Driver:
    """The CUDA driver.

    Raises:
        Unavailable: there is none.
    """
    driver = bindings().driver
    if driver is None:
        raise Unavailable("the CUDA driver was not found")
    return driver


def current_stream(index: int) -> int:
    """The handle of a GPU's current stream, without the microseconds that torch's Stream object takes."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return torch.cuda.current_stream(index).cuda_stream if raw is None else raw(index)


def tensor_map(x: Tensor, sizes: list[int], strides: list[int], box: list[int]) -> TensorMap:
    """A TMA tensor map over x's memory.

    Args:
        sizes: of the dimensions, innermost first.
        strides: in bytes, of all dimensions but the innermost.
        box: elements of a box; its rows are 32, 64 or 128 bytes, swizzled over that width in shared memory. What is out
            of bounds is loaded as zeros.
    """
    kind = cuda_driver.CU_TENSOR_MAP_DATA_TYPE_UINT8 if x.element_size() == 1 else _MAPPED[x.dtype]
    swizzle: int = getattr(cuda_driver, f"CU_TENSOR_MAP_SWIZZLE_{box[0] * x.element_size()}B")

    def encode(address: int) -> Any:
        return loaded_driver().cuTensorMapEncodeTiled(kind, address, sizes, strides, box, swizzle)

    return TensorMap(x, encode(x.data_ptr()), encode)


class Source:
    """A file of csrc with one kernel of the same name: Source("flash_attention", ...).

    It has the interface of a Triton kernel: constants are compile-time parameters (macros), `warmup` compiles,
    `self[grid](*args, **constants)` launches on the current stream.

    Args:
        name: of the file without ".cu", and of the kernel.
        prepare: see `Prepare`.
        arg_names: of the arguments of a launch.
        variants: see `Variants`.
        reads_before_wait: arguments that the kernel reads before `pdl_wait`, see `pdl`; None for a kernel that never
            waits and so is launched without PDL. By default `pdl_wait` is its first statement.
        hopper: whether it runs on Hopper alone.
        only: compute capabilities that it is for; None for all.
        since: the first compute capability that it is for; None for all.
    """

    def __init__(
        self,
        name: str,
        prepare: Prepare,
        arg_names: tuple[str, ...],
        variants: Variants | None = None,
        reads_before_wait: tuple[str, ...] | None = (),
        *,
        hopper: bool = False,
        only: Collection[tuple[int, int]] | None = None,
        since: tuple[int, int] | None = None,
    ) -> None:
        self.name, self.prepare, self.arg_names = name, prepare, arg_names
        self.reads_before_wait, self.hopper, self.only, self.since = reads_before_wait, hopper, only, since
        self.variants: Variants = variants or (lambda constants: ())
        self.kept = True  # whether the cache took the last compiled kernel
        self._functions: dict[Any, Any] = {}
        self._failed: set[int | None] = set()
        self._lock = threading.Lock()

    def supported(self, device: torch.device) -> bool:
        """Whether it can be used on a device: it runs there, NVRTC supports the device and nothing has failed there so
        far."""
        if device.type != "cuda" or (self.hopper and not triton_runtime.hopper(device)):
            return False
        if self.only is not None and triton_runtime.capability(device) not in self.only:
            return False
        if self.since is not None and triton_runtime.capability(device) < self.since:
            return False
        found = bindings()
        there = found.nvrtc is not None and found.driver is not None
        return there and device.index not in self._failed and unsupported(device) is None

    def warmup(self, *args: Any, grid: Any = None, **constants: int) -> Any:
        """Compile and load it for the current device; returns the driver's function.

        Raises:
            Unavailable: that failed; it is logged, and `supported` is False from then on.
        """
        index = torch.cuda.current_device()
        code = None
        with contextlib.suppress(Exception):  # the next line raises it again
            code = self.compiled(architecture(index), constants)  # compilation runs in parallel, loading does not
        return self._function(index, constants, code)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: int) -> None:
        index = torch.cuda.current_device()
        function = self._function(index, constants)
        own, threads, shared = self.prepare(*args, **constants)
        kept = [cell(x) for x in own]
        places = [ctypes.addressof(x) for x in kept]
        table = (ctypes.c_void_p * len(places))(*places)
        blocks = (*grid, 1, 1)[:3]
        stream = current_stream(index)
        driver = loaded_driver()
        at = ctypes.addressof(table)
        early = self._read_early(args, index)
        if early is not None and pdl.allowed(early):
            launch_log.put(Opaque("a launch in a capture"))
            driver.cuLaunchKernelEx(pdl.launch_config(blocks, threads, shared, stream), function, at)
        else:
            launch_log.put(CudaLaunch(function, blocks, threads, shared, own, early))
            driver.cuLaunchKernel(function, blocks, (threads, 1, 1), shared, stream, at)

    def _read_early(self, args: tuple[Any, ...], index: int) -> list[Tensor] | None:
        names = self.reads_before_wait
        if names is None or triton_runtime.capability(torch.device("cuda", index)) < pdl.MIN_CAPABILITY:
            return None
        return [args[self.arg_names.index(name)] for name in names]

    def _function(self, index: int, constants: dict[str, int], code: bytes | None = None) -> Any:
        key = index, *constants.items()
        with self._lock:
            if key not in self._functions:
                try:
                    self._functions[key] = self._load(index, constants, code)
                except Exception as exc:
                    self._failed.add(index)
                    logger.warning("%s.cu is not used: %s", self.name, exc)
                    raise Unavailable(str(exc)) from exc
            return self._functions[key]

    def _load(self, index: int, constants: dict[str, int], code: bytes | None) -> Any:
        driver = loaded_driver()
        device = _use_context(index)
        code = code or self.compiled(architecture(index), constants)
        function = driver.cuModuleGetFunction(driver.cuModuleLoadData(code), self.name.encode())
        most = driver.cuDeviceGetAttribute(cuda_driver.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device)
        fixed = driver.cuFuncGetAttribute(cuda_driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function)
        limit = cuda_driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.cuFuncSetAttribute(function, limit, most - fixed)
        return function

    def compiled(self, architecture: str, constants: dict[str, int]) -> bytes:
        """The cubin, from the user's cache or compiled now; Unavailable if it does not compile."""
        source = (SOURCES / f"{self.name}.cu").read_bytes()
        included = b"".join(_headers().values())
        key = repr((loaded_nvrtc().version(), architecture, sorted(constants.items()))).encode()
        file = folder() / f"{self.name}-{hashlib.sha256(key + included + source).hexdigest()[:16]}.cubin"
        with _locks.setdefault(file, threading.Lock()):
            try:
                kept = cache_folder.read(file, folder())
                code, seal = kept[:-_SEAL], kept[-_SEAL:]
                if seal == hashlib.sha256(code).digest():  # a corrupt cubin can crash the driver
                    return code
            except OSError:
                pass  # not cached yet, or not trusted
            code, _ = build(source, architecture, constants)
            self.kept = self._keep(file, code)
            return code

    def _keep(self, file: Path, code: bytes) -> bool:
        """Write to the user's cache; returns whether that worked."""
        try:
            cache_folder.write(file, folder(), code + hashlib.sha256(code).digest())
        except OSError as exc:
            logger.debug("%s is compiled anew each time: %s", self.name, exc)
            # Windows replaces no file that another process has open, which reads or keeps the same kernel
            return isinstance(exc, PermissionError) and file.is_file()
        return True


def cell(x: Any) -> Any:
    """A parameter of a launch, see `Prepare`, as the ctypes object that the driver reads."""
    if x is None or isinstance(x, Tensor):
        return ctypes.c_void_p(None if x is None else x.data_ptr())
    return x.encoded if isinstance(x, (TensorMap, AddressTable)) else x


def _headers() -> dict[bytes, bytes]:
    """The headers of csrc by name."""
    return {file.name.encode(): file.read_bytes() for file in sorted(SOURCES.glob("*.h"))}


def build(source: bytes, architecture: str, constants: dict[str, int]) -> tuple[bytes, str]:
    """Compile CUDA C++ for an architecture with macros; returns (cubin, log).

    Raises:
        Unavailable: it does not compile; the message is the compiler's log.
    """
    options = [f"--gpu-architecture={architecture}", "-default-device", "--ptxas-options=-v"]
    options += [f"-D{name}={value}" for name, value in constants.items()]
    try:
        return loaded_nvrtc().compile(source, _headers(), options)
    finally:
        # the compiler's, of which a thread would keep tens of MB
        freed_memory.give_back_of_thread()


def loaded_nvrtc() -> Nvrtc:
    """NVRTC.

    Raises:
        Unavailable: there is none.
    """
    compiler = bindings().nvrtc
    if compiler is None:
        raise Unavailable(no_nvrtc() or "there is no NVRTC")
    return compiler
