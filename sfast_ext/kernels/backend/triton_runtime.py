"""Triton where it is installed, stand-ins where it is not, and what all launchers ask before they launch."""

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

from sfast_ext.kernels.backend import health, nvrtc, triton_versions

triton: Any = None
tl: Any = None
try:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
except Exception:  # a broken wheel raises anything; environment.triton_error() tells what
    triton = tl = None

AVAILABLE = triton is not None
VERSION: tuple[int, ...] = tuple(map(int, triton.__version__.split(".")[:2])) if AVAILABLE else ()
"""Major and minor version; empty without Triton."""
# The interpreter on NumPy came with Triton 3.0; what the variable turned on before that is another thing.
INTERPRETED = AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1" and VERSION >= (3, 0)

# What a kernel says that begins as the one in front of it ends, since Triton 3.5: 3.4 has the functions, and the option
# to launch it so, but calls them with a word, "_semantic", that they do not take.
_next_may_begin: Any = None
_after_previous: Any = None
_options: Any = {}  # what a launch may say beside a kernel's own constants, from Triton 3.0 on
if AVAILABLE and not INTERPRETED:
    with contextlib.suppress(Exception):
        _options = importlib.import_module("triton.backends.nvidia.compiler").CUDAOptions.__dataclass_fields__
        _extra = importlib.import_module("triton.language.extra.cuda")
        _taken = inspect.signature(_extra.gdc_wait).parameters
        if "launch_pdl" in _options and "_semantic" in _taken:
            _next_may_begin, _after_previous = _extra.gdc_launch_dependents, _extra.gdc_wait
HAS_EARLY = _after_previous is not None
FUSES: dict[str, bool] = {"enable_fp_fusion": True} if "enable_fp_fusion" in _options else {}
"""What each launch says of a product and a sum in one rounding: all versions do so, up to 3.9 without being told."""

if TYPE_CHECKING:
    from typing import Any as constexpr
elif AVAILABLE:
    # Annotations must read "constexpr", not "tl.constexpr": older interpreters compare the text.
    constexpr = tl.constexpr
else:
    constexpr = object

HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32)
MAX_BLOCK = 16384  # elements of the widest row that one program keeps in registers
_HOPPER = 9  # its compute capability
MAX_GRID_YZ = 65535  # CUDA's limit for the second and third dimension of a grid


def jit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """triton.jit(**options); without Triton, a decorator that leaves alone a function never to be called."""
    if AVAILABLE:
        return triton.jit(**options)
    return lambda function: function


@jit()
def begin_early(EARLY):
    """The first statement of every kernel, in all of its programs: see `begins_early`."""
    if EARLY:
        _next_may_begin()
        _after_previous()


def cdiv(x: int, y: int) -> int:
    return -(-x // y)


def next_power_of_2(x: int) -> int:
    return 1 << max(x - 1, 0).bit_length()


@functools.lru_cache(maxsize=None)
def multiprocessors(device: torch.device) -> int:
    """How many the GPU has; in the interpreter a few, so that tests are quick and still split the work."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


Noted = list[tuple[Any, tuple[Any, ...], dict[str, Any], str]]
_collected: ContextVar[tuple[Noted, torch.device | None] | None] = ContextVar("collected", default=None)


@contextlib.contextmanager
def collecting(device: torch.device | None = None) -> Iterator[Noted]:
    """Within, in this thread, tensors of any device are taken for some of `device`, and launches only noted: kernel,
    arguments, constants, and the name of the module whose launch function it was."""
    found: Noted = []
    token = _collected.set((found, device))
    try:
        yield found
    finally:
        _collected.reset(token)


def are_collected() -> bool:
    """Whether launches are only noted: strides are those of the original forward then, not of the rewritten graph."""
    return _collected.get() is not None


def device_of(x: Tensor) -> torch.device:
    """Where a launch with `x` runs, or would run while launches are collected."""
    collected = _collected.get()
    return x.device if collected is None or collected[1] is None else collected[1]


@functools.lru_cache(maxsize=None)
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU; (0, 0) for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def refusal(device: torch.device, dtype: torch.dtype | None = None) -> str | None:
    """Why the installed Triton compiles nothing for a GPU, or nothing with values of a dtype there; None where it
    does, and where there is no GPU to compile for."""
    if not AVAILABLE or device.type != "cuda":
        return None
    return triton_versions.refusal(VERSION, capability(device), dtype)


def runs(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a kernel can take these tensors; where not, a launch calls its reference.

    Not taken: no Triton, a device Triton cannot use, or a dtype it cannot use there (`refusal`), float64 and what is no
    float, several devices, and subclasses of Tensor (fake, quantised), which mean more than their memory says. While
    launches are collected, tensors without memory stand in for those of a GPU.
    """
    device, collected = x.device, are_collected()
    if not collected and (not AVAILABLE or not (INTERPRETED or capability(device) >= (7, 0))):
        return False
    where = device_of(x)
    for tensor in (x, *others):
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES or refusal(where, tensor.dtype) is not None:
            return False
        if not collected and (tensor.device != device or type(tensor) not in (Tensor, torch.nn.Parameter)):
            return False
    return True


def multiplies(x: Tensor) -> bool:
    """Whether kernels with matrix products of ours run where x lies: on Hopper, as they were measured nowhere else; and
    in float16 in the interpreter, which of bfloat16 multiplies the bits."""
    if INTERPRETED:
        return x.dtype == torch.float16
    return x.dtype in HALF and hopper(device_of(x))


def hopper(device: torch.device) -> bool:
    return capability(device)[0] == _HOPPER


def begins_early(device: torch.device) -> bool:
    """Whether kernels of Triton may begin there as the kernel in front of them ends ("programmatic dependent launch").

    In captures and out of them alike: how a kernel is launched is a part of what Triton compiles, and there shall be
    one compilation. It is right anywhere, because every program waits before it reads or writes anything, until the
    kernel in front has ended and what that wrote can be read. A kernel that has ended thus had all in front of it end,
    which is what kernels of others, copies and events behind it rely on.
    """
    return HAS_EARLY and nvrtc.beginnings_are_kept() and capability(device)[0] >= _HOPPER


def start(kernel: Any, grid: tuple[int, ...], x: Tensor, *args: Any, **constants: Any) -> None:
    """Launches on x's device: Triton itself would take the current one. A kernel of Triton is told EARLY here,
    and `FUSES`."""
    if "EARLY" in kernel.arg_names:
        early = begins_early(device_of(x))
        constants |= FUSES | ({"EARLY": True, "launch_pdl": True} if early else {"EARLY": False})
    collected = _collected.get()
    if collected is not None:
        collected[0].append((kernel, (x, *args), constants, _launcher(sys._getframe(1))))
        return
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
