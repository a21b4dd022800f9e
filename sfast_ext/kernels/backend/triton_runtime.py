"""Triton if it is installed, stand-ins if not, and what launch functions share: which tensors kernels take
(`accepts_tensors`), whether Triton's take them on their device (`accepts`), launches (`launch_kernel`), and dry runs
that only record launches (`dry_run`)."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sfast_ext.kernels.backend import launch_log, pdl, triton_versions

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

HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32)
MAX_BLOCK = 16384  # elements of the widest row one program keeps in registers
_HOPPER = 9  # major compute capability
MIN_CAPABILITY = 7, 0
"""Of kernels for any card."""
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
"""Launches: (function, arguments, constants, name of the kernel whose launch function it was)."""
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
    """Within, in this thread, no Triton kernel is launched: for plans that are made without Triton although it
    imports."""
    token = _off.set(True)
    try:
        yield
    finally:
        _off.reset(token)


@functools.lru_cache(maxsize=None)
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU; (0, 0) for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def unsupported(device: torch.device, dtype: torch.dtype | None = None) -> str | None:
    """Why the installed Triton cannot compile for a GPU, or not with a dtype there; None if it can, and without a GPU
    or Triton."""
    if not AVAILABLE or device.type != "cuda":
        return None
    return triton_versions.unsupported(VERSION, capability(device), dtype)


def accepts_tensors(x: Tensor, *others: Tensor | None) -> str | None:
    """Why kernels, of whatever language, do not take these tensors; None if they do.

    They take dtypes of `DTYPES`, tensors of one device, and no subclasses of Tensor (fake, quantised), whose meaning is
    not their memory alone. In a dry run tensors without memory stand in for those of a GPU.
    """
    given = [x, *(tensor for tensor in others if tensor is not None)]
    if any(tensor.dtype not in DTYPES for tensor in given):
        return "a dtype other than float16, bfloat16 and float32"
    if is_dry_run() or all(t.device == x.device and type(t) in (Tensor, torch.nn.Parameter) for t in given):
        return None
    return "tensors of several devices, or of a subclass of Tensor"


def accepts(x: Tensor, *others: Tensor | None) -> str | None:
    """Why no Triton kernel can be launched with these tensors; None if one can. Kernels in CUDA C++ ask `cuda_tier`."""
    if not AVAILABLE or _off.get():
        return "Triton is not used"
    if not is_dry_run() and not INTERPRETED and capability(x.device) < MIN_CAPABILITY:
        return "no GPU of compute capability 7.0 or later"
    device = device_of(x)
    reasons = (unsupported(device, t.dtype) for t in (x, *others) if t is not None)
    return accepts_tensors(x, *others) or next((reason for reason in reasons if reason is not None), None)


def accepts_products(x: Tensor) -> str | None:
    """Why Triton kernels with matrix products (mma) are not used for x; None if they are: in half precision on Hopper,
    as they were measured nowhere else, and in float16 in the interpreter, which multiplies bfloat16 wrongly."""
    if INTERPRETED:
        return None if x.dtype == torch.float16 else "products in Triton's interpreter are in float16"
    if x.dtype in HALF and hopper(device_of(x)):
        return None
    return "products in Triton are for half precision on Hopper"


def hopper(device: torch.device) -> bool:
    return capability(device)[0] == _HOPPER


def pdl_enabled(device: torch.device) -> bool:
    """Whether Triton kernels are launched with PDL on a device, see pdl.py.

    The same inside and outside of captures: the launch option is part of what Triton compiles, and one compilation is
    to serve both. It is always correct: every program waits, before it reads or writes anything, until the previous
    kernel has completed and its writes are visible. So a completed kernel implies that all before it completed, which
    foreign kernels, copies and events behind it rely on.
    """
    return HAS_PDL and pdl.capture_keeps_pdl() and capability(device) >= pdl.MIN_CAPABILITY


def launch_kernel(kernel: Any, grid: tuple[int, ...], x: Tensor, *args: Any, **constants: Any) -> None:
    """Launch a kernel on x's device (Triton itself would use the current one), or record it in a dry run.

    Triton kernels, which have an argument PDL, also get the options for PDL and `FP_FUSION`.
    """
    if "PDL" in kernel.arg_names:
        enabled = pdl_enabled(device_of(x))
        constants |= FP_FUSION | ({"PDL": True, "launch_pdl": True} if enabled else {"PDL": False})
    state = _dry_run.get()
    if state is not None:
        state[0].append((kernel, (x, *args), constants, launch_log.kernel.get()))
        return
    if "PDL" in kernel.arg_names:
        launch_log.put(launch_log.TritonLaunch(kernel, grid, (x, *args), constants))
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            kernel[grid](x, *args, **constants)
    else:
        kernel[grid](x, *args, **constants)


def channels_inner(x: Tensor) -> Tensor:
    """(N, C, ...) as contiguous (N, ..., C): a view if x is channels_last already, else a copy."""
    return (x.permute(0, 2, 3, 1) if x.dim() == 4 else x.movedim(1, -1)).contiguous()


def channels_outer(y: Tensor) -> Tensor:
    """(N, ..., C) as a view (N, C, ...)."""
    return y.permute(0, 3, 1, 2) if y.dim() == 4 else y.movedim(-1, 1)
