"""Kernels in CUDA C++, compiled where they run by NVRTC, for what Triton has no words for.

Through NVIDIA's own bindings, the package cuda-bindings, which newer versions of torch bring with them; without it the
kernels are not there, and their callers have another way. What was compiled is kept in the user's cache.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import hashlib
import importlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sfast_ext import cache_folder

logger = logging.getLogger("sfast_ext")

SOURCES = Path(__file__).parents[3] / "csrc"
_SEAL = hashlib.sha256().digest_size

Prepare = Callable[..., tuple[list[Any], int, int]]
"""From arguments and constants of a launch: the kernel's own arguments (tensors or None for their addresses, ctypes'
numbers, tensor maps), threads of a block, bytes of shared memory."""
Siblings = Callable[[dict[str, int]], Iterable[dict[str, int]]]
"""From constants of a launch: those that another size of picture may ask for, the likeliest first, these among them."""
# where memory begins and ends that nothing captured writes, in order; None where kernels begin one after another
_still: ContextVar[list[tuple[int, int]] | None] = ContextVar("still", default=None)
# CUDA's version from which a capture keeps what a launch says of its beginning
_KEEPS_BEGINNINGS = 12, 3
# one for each file: what two threads ask for at once is made once
_making: dict[Path, threading.Lock] = {}
_bound = threading.local()


def folder() -> Path:
    """Where compiled kernels are kept: $SFAST_CACHE_DIR, or a folder in $TORCH_EXTENSIONS_DIR or the user's cache."""
    chosen = os.environ.get("SFAST_CACHE_DIR")
    if chosen:
        return Path(chosen)
    above = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME")
    return (Path(above) if above else Path.home() / ".cache") / "sfast_ext"


def folder_refusal() -> str | None:
    """Why no compiled kernel is kept, where the folder for them is not the user's alone; else None."""
    return cache_folder.refusal(folder(), folder())


class Unavailable(RuntimeError):
    """A kernel cannot be had here; says what would not do."""


def architecture(index: int | None) -> str:
    """What a GPU's kernels are compiled for; from Hopper on with what later ones may be without."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@functools.lru_cache(maxsize=None)
def bindings() -> tuple[Any, Any] | None:
    """cuda.bindings' driver and nvrtc; None where they are not installed, or do not load."""
    try:
        return importlib.import_module("cuda.bindings.driver"), importlib.import_module("cuda.bindings.nvrtc")
    except Exception:  # a broken installation raises anything
        return None


@functools.lru_cache(maxsize=None)
def _known() -> tuple[str, tuple[int, ...]] | None:
    """NVRTC's version, and the compute capabilities that it compiles for, times ten, in order; None where it says
    nothing of them."""
    found = bindings()
    if found is None:
        return None
    try:
        version, known = checked(found[1].nvrtcVersion()), checked(found[1].nvrtcGetSupportedArchs())
        return ".".join(map(str, version)), tuple(sorted(map(int, known)))
    except Exception as exc:
        logger.debug("NVRTC does not say what it compiles for: %s", exc)
        return None


def refusal(device: torch.device) -> str | None:
    """Why NVRTC compiles nothing for a GPU, whose architecture it does not know; None where it does, as far as it says,
    and where no GPU or no NVRTC is there."""
    told = _known() if device.type == "cuda" and torch.cuda.is_available() else None
    if told is None or not told[1]:
        return None
    major, minor = torch.cuda.get_device_capability(device.index)
    version, known = told
    if 10 * major + minor in known:
        return None
    least, most = (f"{each // 10}.{each % 10}" for each in (known[0], known[-1]))
    return (
        f"NVRTC {version} does not know compute capability {major}.{minor}, but {least} to {most}, so kernels in CUDA"
        " C++ are left out"
    )


def checked(result: tuple[Any, ...]) -> Any:
    """What a call of the bindings returned beside its error; Unavailable where there is one."""
    error, *values = result
    if int(error):
        raise Unavailable(f"{type(error).__name__}.{getattr(error, 'name', error)}")
    return values[0] if len(values) == 1 else values


def bind(index: int) -> None:
    """A GPU's context is this thread's: what the driver launches wants one, and torch may not have asked for it yet."""
    if getattr(_bound, "index", None) != index:
        _use_context(index)
        _bound.index = index


def _use_context(index: int) -> Any:
    """A GPU, for the driver."""
    # the runtime's own context, which a thread that has called nothing of it yet is without
    driver = bindings()[0]  # type: ignore[index]
    device = checked(driver.cuDeviceGet(index))
    checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(device))))
    return device


def current_stream(index: int) -> int:
    """The handle of a GPU's current stream: torch takes microseconds to make an object of it."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return torch.cuda.current_stream(index).cuda_stream if raw is None else raw(index)


@contextlib.contextmanager
def beginning_early(still: Iterable[Tensor]) -> Iterator[None]:
    """Within, in this thread, while it captures: a kernel may begin as the one in front of it ends, and read, before it
    waits for that, the memory of `still`, which nothing that is captured writes ("programmatic dependent launch")."""
    token = _still.set(_spans(still) if beginnings_are_kept() else None)
    try:
        yield
    finally:
        _still.reset(token)


@functools.lru_cache(maxsize=None)
def beginnings_are_kept() -> bool:
    try:
        built = tuple(int(part) for part in str(torch.version.cuda).split(".")[:2])
        runs = checked(bindings()[0].cuDriverGetVersion())  # type: ignore[index]
    except Exception:
        return False
    major, minor = _KEEPS_BEGINNINGS
    return built >= _KEEPS_BEGINNINGS and runs >= 1000 * major + 10 * minor


def _spans(still: Iterable[Tensor]) -> list[tuple[int, int]]:
    return sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in still if t.is_cuda)


def _lies_still(x: Tensor, spans: list[tuple[int, int]]) -> bool:
    """Whether all memory of a dense tensor lies within one of the spans."""
    dense = x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
    begin = x.data_ptr()
    place = bisect.bisect_right(spans, begin, key=lambda span: span[0]) - 1
    return dense and place >= 0 and begin + x.nbytes <= spans[place][1]


def tensor_map(x: Tensor, sizes: list[int], strides: list[int], box: list[int]) -> Any:
    """A map for the copy engine over x's memory: `sizes`, innermost first; `strides` in bytes, of all but that; rows of
    boxes are 32, 64 or 128 bytes in shared memory, swizzled over that width, with zeros where there is no more of x."""
    driver = bindings()[0]  # type: ignore[index]
    kind = "BFLOAT16" if x.dtype == torch.bfloat16 else "FLOAT16"
    return checked(
        driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
            len(sizes),
            x.data_ptr(),
            [driver.cuuint64_t(n) for n in sizes],
            [driver.cuuint64_t(n) for n in strides],
            [driver.cuuint32_t(n) for n in box],
            [driver.cuuint32_t(1)] * len(sizes),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{box[0] * x.element_size()}B"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


class Source:
    """A file of csrc with one kernel of the same name: Source("flash_attention", ...).

    As kernels of Triton do, it compiles for its constants, here what the file's macros are to be: `warmup` does so
    ahead, `self[grid](*args, **constants)` launches on the current stream.

    Args:
        reads_early: which arguments its kernel reads before it waits for the kernels in front, see `beginning_early`;
            None for a kernel that does not wait.
    """

    def __init__(
        self,
        name: str,
        prepare: Prepare,
        arg_names: tuple[str, ...],
        siblings: Siblings | None = None,
        reads_early: tuple[str, ...] | None = None,
    ) -> None:
        self.name, self.prepare, self.arg_names = name, prepare, arg_names
        self.reads_early = reads_early
        self.siblings: Siblings = siblings or (lambda given: ())
        self.kept = True  # whether the user's cache took what was compiled last
        self._functions: dict[Any, Any] = {}
        self._refused: set[int | None] = set()
        self._lock = threading.Lock()

    def available(self, device: torch.device) -> bool:
        """Whether it may be had on a device: NVRTC knows that, and nothing has failed there so far."""
        return bindings() is not None and device.index not in self._refused and refusal(device) is None

    def warmup(self, *args: Any, grid: Any = None, **constants: int) -> Any:
        """Compiles and loads it for the current device."""
        index = torch.cuda.current_device()
        code = None
        with contextlib.suppress(Exception):  # which the next line meets, and tells
            code = self.compiled(architecture(index), constants)  # beside others, which load one after another
        return self._function(index, constants, code)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: int) -> None:
        index = torch.cuda.current_device()
        function = self._function(index, constants)
        own, threads, shared = self.prepare(*args, **constants)
        kept = [_address(x) if x is None or isinstance(x, Tensor) else x for x in own]
        places = [x.getPtr() if hasattr(x, "getPtr") else ctypes.addressof(x) for x in kept]
        table = (ctypes.c_void_p * len(places))(*places)
        blocks = (*grid, 1, 1)[:3]
        stream = current_stream(index)
        driver = bindings()[0]  # type: ignore[index]
        at = ctypes.addressof(table)
        if self._begins_early(args):
            checked(driver.cuLaunchKernelEx(_early(driver, blocks, threads, shared, stream), function, at, 0))
        else:
            checked(driver.cuLaunchKernel(function, *blocks, threads, 1, 1, shared, stream, at, 0))

    def _begins_early(self, args: tuple[Any, ...]) -> bool:
        spans = _still.get()
        if spans is None or self.reads_early is None or not torch.cuda.is_current_stream_capturing():
            return False
        return all(_lies_still(args[self.arg_names.index(name)], spans) for name in self.reads_early)

    def _function(self, index: int, constants: dict[str, int], code: bytes | None = None) -> Any:
        key = index, *constants.items()
        with self._lock:
            if key not in self._functions:
                try:
                    self._functions[key] = self._load(index, constants, code)
                except Exception as exc:
                    self._refused.add(index)
                    logger.warning("%s.cu is not used: %s", self.name, exc)
                    raise Unavailable(str(exc)) from exc
            return self._functions[key]

    def _load(self, index: int, constants: dict[str, int], code: bytes | None) -> Any:
        driver = bindings()[0]  # type: ignore[index]
        device = _use_context(index)
        code = code or self.compiled(architecture(index), constants)
        module = checked(driver.cuModuleLoadData(code))
        function = checked(driver.cuModuleGetFunction(module, self.name.encode()))
        limits, uses = driver.CUdevice_attribute, driver.CUfunction_attribute
        most = checked(
            driver.cuDeviceGetAttribute(limits.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device)
        )
        fixed = checked(driver.cuFuncGetAttribute(uses.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function))
        checked(driver.cuFuncSetAttribute(function, uses.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most - fixed))
        return function

    def compiled(self, architecture: str, constants: dict[str, int]) -> bytes:
        """The machine code, from the user's cache or made now."""
        source = (SOURCES / f"{self.name}.cu").read_bytes()
        included = b"".join(_headers().values())
        nvrtc = bindings()[1]  # type: ignore[index]
        key = repr((checked(nvrtc.nvrtcVersion()), architecture, sorted(constants.items()))).encode()
        file = folder() / f"{self.name}-{hashlib.sha256(key + included + source).hexdigest()[:16]}.cubin"
        with _making.setdefault(file, threading.Lock()):
            try:
                kept = cache_folder.read(file, folder())
                code, seal = kept[:-_SEAL], kept[-_SEAL:]
                if seal == hashlib.sha256(code).digest():  # of a spoilt file the driver may make an end of the process
                    return code
            except OSError:
                pass  # not there yet, or not to be trusted
            code, _ = build(source, architecture, constants)
            self.kept = self._keep(file, code)
            return code

    def _keep(self, file: Path, code: bytes) -> bool:
        """Whether the user's cache took it."""
        try:
            cache_folder.make(file.parent, folder())
            with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as made:
                made.write(code + hashlib.sha256(code).digest())
            os.replace(made.name, file)  # two at once: either will do, half a file will not
        except OSError as exc:
            logger.debug("%s is compiled anew each time: %s", self.name, exc)
            return False
        return True


def _early(driver: Any, blocks: tuple[int, ...], threads: int, shared: int, stream: int) -> Any:
    """A launch that begins as the kernel in front of it ends."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared, stream
    config.attrs, config.numAttrs = [attribute], 1
    return config


def _address(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def _headers() -> dict[bytes, bytes]:
    """What sources may include, by name."""
    return {file.name.encode(): file.read_bytes() for file in sorted(SOURCES.glob("*.h"))}


def build(source: bytes, architecture: str, constants: dict[str, int]) -> tuple[bytes, str]:
    """(machine code, what the compiler had to say); Unavailable with its words where it does not compile."""
    nvrtc = bindings()[1]  # type: ignore[index]
    headers = _headers()
    program = checked(
        nvrtc.nvrtcCreateProgram(source, b"kernel.cu", len(headers), list(headers.values()), list(headers))
    )
    options = [f"--gpu-architecture={architecture}", "-default-device", "--ptxas-options=-v"]
    options += [f"-D{name}={value}" for name, value in constants.items()]
    try:
        error = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
        words = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, words)
        log = words.decode(errors="replace").strip("\0 \n")
        if int(error):
            raise Unavailable(log or str(error))
        code = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
        checked(nvrtc.nvrtcGetCUBIN(program, code))
        return code, log
    finally:
        nvrtc.nvrtcDestroyProgram(program)
