"""Triton where it is installed, stand-ins where it is not, and what launch functions share: which tensors kernels read
(`plain`), can Triton's be launched with them (`supported`), launching (`launch_kernel`), and dry runs that only record
launches (`dry_run`)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sfast_ext.kernels.backend import health, launch_log, pdl, triton_versions

triton: Any = None
tl: Any = None
try:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
except Exception:  # a broken wheel raises anything; environment.triton_error() reports it
    triton = tl = None

AVAILABLE = triton is not None
VERSION: tuple[int, ...] = tuple(map(int, triton.__version__.split(".")[:2])) if AVAILABLE else ()
"""Major and minor version; empty without Triton."""
# Triton's interpreter on NumPy exists since 3.0; before, the variable meant something else.
INTERPRETED = AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1" and VERSION >= (3, 0)

# Programmatic dependent launch, see pdl.py: griddepcontrol.launch_dependents and griddepcontrol.wait. Since Triton 3.5:
# 3.4 has both and the launch option, but passes them "_semantic", which they do not take.
_gdc_launch_dependents: Any = None
_gdc_wait: Any = None
_options: Any = {}  # launch options of the NVIDIA backend, from Triton 3.0 on
if AVAILABLE and not INTERPRETED:
    with contextlib.suppress(Exception):
        _options = importlib.import_module("triton.backends.nvidia.compiler").CUDAOptions.__dataclass_fields__
        _extra = importlib.import_module("triton.language.extra.cuda")
        _parameters = inspect.signature(_extra.gdc_wait).parameters
        if "launch_pdl" in _options and "_semantic" in _parameters:
            _gdc_launch_dependents, _gdc_wait = _extra.gdc_launch_dependents, _extra.gdc_wait
HAS_PDL = _gdc_wait is not None
FP_FUSION: dict[str, bool] = {"enable_fp_fusion": True} if "enable_fp_fusion" in _options else {}
"""Launch option for fused multiply-add: the default of all versions up to 3.9, and stated for later ones."""

if TYPE_CHECKING:
    from typing import Any as constexpr
elif AVAILABLE:
    # Annotations must read "constexpr", not "tl.constexpr": older interpreters compare the text.
    constexpr = tl.constexpr
else:
    constexpr = object

MIN_CAPABILITY = (7, 0)
"""The compute capability from which on a GPU is accelerated, by kernels of any kind."""
HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32)
MAX_BLOCK = 16384  # elements of the widest row one program keeps in registers
_HOPPER = 9  # major compute capability
MAX_GRID_YZ = 65535  # CUDA's limit for the second and third dimension of a grid


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """triton.jit(**options); without Triton a decorator that returns the function, which is never called."""
    if AVAILABLE:
        return triton.jit(**options)
    return lambda function: function


@jit()
def pdl_wait(PDL):
    """The first statement of every kernel: with PDL, let the next kernel be scheduled and wait for the previous one."""
    if PDL:
        _gdc_launch_dependents()
        _gdc_wait()


def cdiv(x: int, y: int) -> int:
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    return 1 << max(x - 1, 0).bit_length()


@functools.lru_cache(maxsize=None)
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 8 in the interpreter, so that tests are fast and still split work."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


Recorded = list[tuple[Any, tuple[Any, ...], dict[str, Any], str]]
"""Launches: (kernel, arguments, constants, name of the kernel file whose launch function it was)."""
_dry_run: ContextVar[tuple[Recorded, torch.device | None] | None] = ContextVar("dry_run", default=None)


@contextlib.contextmanager
def dry_run(device: torch.device | None = None) -> Iterator[Recorded]:
    """Within, in this thread, launches are recorded instead of executed, and tensors of any device (also meta) pass for
    tensors of `device`."""
    recorded: Recorded = []
    token = _dry_run.set((recorded, device))
    try:
        yield recorded
    finally:
        _dry_run.reset(token)


def is_dry_run() -> bool:
    """Whether launches are only recorded: strides are then those of the original forward, not of the rewritten
    graph."""
    return _dry_run.get() is not None


def device_of(x: Tensor) -> torch.device:
    """The device of a launch with `x`: its own, or that of the dry run."""
    state = _dry_run.get()
    return x.device if state is None or state[1] is None else state[1]


_off: ContextVar[bool] = ContextVar("triton_off", default=False)


@contextlib.contextmanager
def without_triton() -> Iterator[None]:
    """Within, in this thread, no Triton kernel is launched: for plans that are made without Triton where it imports."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)


@functools.lru_cache(maxsize=None)
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU; (0, 0) for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def refusal(device: torch.device, dtype: torch.dtype | None = None) -> str | None:
    """Why the installed Triton cannot compile for a GPU, or not with a dtype there; None where it can, and without a
    GPU or Triton."""
    if not AVAILABLE or device.type != "cuda":
        return None
    return triton_versions.refusal(VERSION, capability(device), dtype)


def plain(x: Tensor, *others: Tensor | None) -> bool:
    """Whether our kernels, of whatever language, read these tensors.

    They do not read dtypes other than `DTYPES`, tensors of several devices, and subclasses of Tensor (fake, quantised),
    whose meaning is not their memory alone. In a dry run tensors without memory stand in for those of a GPU.
    """
    given = [x, *(tensor for tensor in others if tensor is not None)]
    if any(tensor.dtype not in DTYPES for tensor in given):
        return False
    return is_dry_run() or all(t.device == x.device and type(t) in (Tensor, torch.nn.Parameter) for t in given)


def supported(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a Triton kernel can be launched with these tensors; where not, launch functions call their reference.

    Not supported: no Triton, a device or a dtype that it cannot use (`refusal`), and tensors that are not `plain`.
    Kernels in CUDA C++ ask `cuda_tier`.
    """
    if not AVAILABLE or _off.get():
        return False
    if not is_dry_run() and not INTERPRETED and capability(x.device) < MIN_CAPABILITY:
        return False
    where = device_of(x)
    dtypes = {tensor.dtype for tensor in (x, *others) if tensor is not None}
    return plain(x, *others) and all(refusal(where, dtype) is None for dtype in dtypes)


def mma_supported(x: Tensor) -> bool:
    """Whether Triton kernels with matrix products (mma) are used for x: in half precision on Hopper, as they were
    measured nowhere else, and in float16 in the interpreter, which multiplies bfloat16 wrongly."""
    if INTERPRETED:
        return x.dtype == torch.float16
    return x.dtype in HALF and hopper(device_of(x))


def hopper(device: torch.device) -> bool:
    return capability(device)[0] == _HOPPER


def pdl_enabled(device: torch.device) -> bool:
    """Whether Triton kernels are launched with PDL on a device, see pdl.py.

    The same inside and outside of captures: the launch option is part of what Triton compiles, and one compilation is
    to serve both. It is always correct: every program waits, before it reads or writes anything, until the previous
    kernel has completed and its writes are visible. So a completed kernel implies that all before it completed, which
    foreign kernels, copies and events behind it rely on.
    """
    return HAS_PDL and pdl.capture_keeps_pdl() and capability(device) >= pdl.LEAST


def launch_kernel(kernel: Any, grid: tuple[int, ...], x: Tensor, *args: Any, **constants: Any) -> None:
    """Launch a kernel on x's device (Triton itself would use the current one), or record it in a dry run.

    Triton kernels, which have an argument PDL, also get the options for PDL and `FP_FUSION`.
    """
    if "PDL" in kernel.arg_names:
        enabled = pdl_enabled(device_of(x))
        constants |= FP_FUSION | ({"PDL": True, "launch_pdl": True} if enabled else {"PDL": False})
    state = _dry_run.get()
    if state is not None:
        state[0].append((kernel, (x, *args), constants, _launcher(sys._getframe(1))))
        return
    if "PDL" in kernel.arg_names:
        launch_log.put(launch_log.TritonLaunch(kernel, grid, (x, *args), constants))
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            kernel[grid](x, *args, **constants)
    else:
        kernel[grid](x, *args, **constants)


def _launcher(frame: FrameType | None) -> str:
    while frame is not None:
        name = health.launcher_of(frame)
        if name is not None:
            return name
        frame = frame.f_back
    return ""


def channels_inner(x: Tensor) -> Tensor:
    """(N, C, ...) as contiguous (N, ..., C): a view where x is channels_last already, else a copy."""
    return (x.permute(0, 2, 3, 1) if x.dim() == 4 else x.movedim(1, -1)).contiguous()


def channels_outer(y: Tensor) -> Tensor:
    """(N, ..., C) as a view (N, C, ...)."""
    return y.permute(0, 3, 1, 2) if y.dim() == 4 else y.movedim(-1, 1)
