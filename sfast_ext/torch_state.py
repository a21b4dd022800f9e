"""States of torch around a call in which no plan is made or run: something records, transforms or watches operations.

They are asked for at the start of each call: a few flags of torch, without an allocation. States that only choose how
torch computes are part of a call's signature instead, see `call_signature.numerical_flags`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import CodeType, SimpleNamespace
from typing import Any

import torch
import torch.library
from torch.autograd import forward_ad
from torch.fx import Tracer, _symbolic_trace
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

from sfast_ext import reasons
from sfast_ext.reasons import Reason


def _known_to_dynamo() -> Callable[[], bool]:
    """The cheapest function of torch of which Dynamo knows that it is true while it traces."""
    for home in (getattr(torch, "compiler", None), torch._utils):
        for name in ("is_dynamo_compiling", "is_compiling"):
            if hasattr(home, name):
                return getattr(home, name)  # type: ignore[no-any-return]
    return bool


def _pre_dispatch_modes() -> Callable[[], int]:
    """How many modes record above autograd. Newer versions of torch have a function mode for each of them."""
    from torch.fx.experimental import proxy_tensor

    if hasattr(proxy_tensor, "PreDispatchTorchFunctionMode"):
        return int
    stacks = getattr(torch._ops, "mode_stack_per_key", None)
    if stacks is None:
        return getattr(torch._ops, "_len_torch_dispatch_stack_pre_dispatch", int)
    key = getattr(torch._C.DispatchKey, "PreDispatch", None)
    return lambda: len(stacks().get(key, ()))


def _with(home: Any, name: str, default: Any) -> Any:
    """A module with this variable; a stand-in if a version of torch lacks it."""
    return home if hasattr(home, name) else SimpleNamespace(**{name: default})


compiles: Callable[[], bool] = _known_to_dynamo()
"""True if Dynamo traces the function that asks, for torch.compile or torch.export. Costs next to nothing otherwise."""

_function_modes, _function_mode = torch._C._len_torch_function_stack, torch._C._get_function_stack_at
_dispatch_modes, _recorders = torch._C._len_torch_dispatch_stack, _pre_dispatch_modes()
_overrides_serve, _traces = torch._C._is_torch_function_enabled, torch._C._is_tracing
_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_dual = _with(forward_ad, "_current_level", -1)
_fx = _with(_symbolic_trace, "_is_fx_tracing_flag", False)
_parametrize = _with(parametrize, "_cache_enabled", 0)


class _Kernels:
    """The kernels of torch's own operators that Python code replaces with `torch.library`.

    Those that torch itself brings are registered when it is imported. A kernel of flash attention is another way to
    compute the same (`torch.nn.attention.activate_flash_attention_impl`).
    """

    _SERVING = frozenset({
        "", "CPU", "CUDA", "CompositeImplicitAutograd", "CompositeExplicitAutograd",
        "CompositeExplicitAutogradNonFunctional", "Autograd", "AutogradCPU", "AutogradCUDA", "AutocastCPU",
        "AutocastCUDA", "ADInplaceOrView", "BackendSelect", "Functionalize", "PreDispatch", "PythonDispatcher",
    })  # fmt: skip
    _FLASH = ("_flash_attention_", "_scaled_dot_product_flash_attention")

    def __init__(self) -> None:
        self.registered: set[str] = getattr(torch.library, "_impls", set())
        """All kernels of Python code, as `aten/add.Tensor/CPU`; `torch.library` keeps this set."""
        self._before = frozenset(self.registered)
        self.count = len(self.registered)
        self.foreign: Reason | None = None
        """Why no plan is run."""
        self.flash: tuple[str, ...] = ()
        """Kernels of flash attention, in order."""

    def read(self) -> None:
        """The set has another length."""
        self.count = len(self.registered)
        names = sorted(name for name in self.registered - self._before if self._serves(name))
        self.flash = tuple(name for name in names if name.endswith("/CUDA") and name[5:].startswith(self._FLASH))
        found = next((name for name in names if name not in self.flash), None)
        self.foreign = None if found is None else reasons.LIBRARY(found.split("/")[1])

    def _serves(self, name: str) -> bool:
        parts = name.split("/")
        return parts[0] == "aten" and parts[-1] in self._SERVING


python_kernels = _kernels = _Kernels()
"""As known to the last `obstacle`."""
_registered = _kernels.registered


def obstacle() -> Reason | None:
    """Why the original forward is to run now. None if a plan may be made or run."""
    if _function_modes() and (mode := _function_mode_of_others()) is not None:
        return _named(mode, "TorchFunctionMode")
    if _dispatch_modes() or _recorders():
        return _named(_get_current_dispatch_mode(), "TorchDispatchMode")
    if _traces():
        return reasons.JIT_TRACE()
    if _transform() is not None:
        return reasons.TRANSFORM(_transform().key().name.lower())
    if _dual._current_level >= 0:
        return reasons.FORWARD_MODE()
    if not _overrides_serve():
        return reasons.NO_OVERRIDES()
    if _parametrize._cache_enabled:
        return reasons.PARAMETRIZE()
    if _fx._is_fx_tracing_flag and _runs(_tracing_code()):
        return reasons.FX_TRACE()
    if len(_registered) != _kernels.count:
        _kernels.read()
    return _kernels.foreign


def traces() -> bool:
    """Whether torch.jit.trace records the call."""
    return _traces()


def transforms() -> bool:
    """Whether torch.func transforms the call, or derivatives are computed in forward mode."""
    return _transform() is not None or _dual._current_level >= 0


def default_device() -> torch.device | None:
    """Where a forward makes tensors, if the program has chosen: `torch.set_default_device`, `with torch.device(...)`.

    Precondition: there is no `obstacle`, so all function modes are of that kind. The last one counts.
    """
    modes = _function_modes()
    return _function_mode(modes - 1).device if modes else None


def _function_mode_of_others() -> Any:
    """A function mode that does more than to choose where tensors are made; None if there is none."""
    modes = [_function_mode(i) for i in range(_function_modes())]
    return next((mode for mode in modes if type(mode) is not DeviceContext), None)


def _named(mode: Any, kind: str) -> Reason:
    return reasons.MODE(kind if mode is None else f"{type(mode).__name__} ({kind})")


@functools.cache
def _tracing_code() -> CodeType:
    return inspect.unwrap(Tracer.trace).__code__


def _runs(code: CodeType) -> bool:
    """Whether this thread is in a function. The flag of torch.fx is that of all threads."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
