"""What the adapters share: accelerators that follow the model their host has loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from sfast_ext.accelerator import Accelerator, Hooks
from sfast_ext.config import Config
from sfast_ext.report import Report
from sfast_ext.slot import accelerator_of, is_own_forward


class Attachment:
    """Keeps an accelerator on whatever module the host has loaded, and on no other.

    Hosts load, switch and unload models from several threads and not always with a callback: `follow` is told the
    module that is about to be used as often as the host gives an occasion, and acts only on a difference.
    """

    def __init__(self, hooks_for: Callable[[nn.Module], Hooks], report: Report, name: str = "unet") -> None:
        self._hooks_for = hooks_for
        self._report = report
        self._name = name
        self._lock = threading.RLock()
        self._accelerators: list[Accelerator] = []
        self._told: tuple[int, str] | None = None

    def follow(self, module: nn.Module | None, config: Config, *, keep: Iterable[nn.Module] = ()) -> Accelerator | None:
        """See to it that `module` is accelerated as `config` says, and that every other module is given back.

        Args:
            keep: modules that the host still holds where they are, whose accelerators stay for their next turn.

        Returns:
            The accelerator of `module`; None where there is none: nothing is loaded, `config` says no, or another
            extension's forward is in the place.
        """
        with self._lock:
            if module is None or not config.enabled:
                self.release()
                return None
            kept = [module, *keep]
            for accelerator in list(self._accelerators):
                if not any(accelerator.module is m for m in kept):
                    self._let_go(accelerator)
            found = next((a for a in self._accelerators if a.module is module), None)
            if found is None:
                return self._attach(module, config)
            if not found.installed():
                self._return_to(found, module)
            if found.config != config:
                found.configure(config)
            return found

    def release(self) -> None:
        """Give back every module; may be called at any time, any number of times."""
        with self._lock:
            for accelerator in list(self._accelerators):
                self._let_go(accelerator)
            self._told = None

    def status(self) -> list[dict[str, Any]]:
        """The accelerators' parts of the status."""
        with self._lock:
            accelerators = list(self._accelerators)
        return [accelerator.status() for accelerator in accelerators]

    def _attach(self, module: nn.Module, config: Config) -> Accelerator | None:
        left_over = accelerator_of(module)
        if left_over is not None:
            # Another extension that had stored our forward put it back after our release, or scripts were loaded anew
            # without the unload callback.
            left_over.release()
        foreign = _foreign_forward(module)
        if foreign is not None:
            self._tell(module, f"{foreign} is in place of the model's forward: not installed while it is")
            return None
        accelerator = Accelerator(module, config, hooks=self._hooks_for(module), report=self._report, name=self._name)
        accelerator.install()
        self._accelerators.append(accelerator)
        self._told = None
        return accelerator

    def _return_to(self, accelerator: Accelerator, module: nn.Module) -> None:
        foreign = _foreign_forward(module)
        if foreign is None:
            # Whoever was over us put the class's own forward back, not ours.
            accelerator.install()
        else:
            # It may hold our forward as its original and restore it: to install over it would make a ring.
            self._tell(module, f"{foreign} is in place of the model's forward: standing aside while it is")

    def _let_go(self, accelerator: Accelerator) -> None:
        self._accelerators.remove(accelerator)
        try:
            accelerator.release()
        except Exception as exc:
            self._report.error("release", exc)

    def _tell(self, module: nn.Module, message: str) -> None:
        # Asked before each step; said once.
        if self._told != (id(module), message):
            self._told = (id(module), message)
            self._report.event("standing aside", message)


def _foreign_forward(module: nn.Module) -> str | None:
    """Who replaced the forward of this very object; None where nobody did, or only accelerate's hook, or we."""
    function = vars(module).get("_old_forward" if "_old_forward" in vars(module) else "forward")
    if function is None or accelerator_of(module) is not None:
        return None
    if is_own_forward(function, module):
        return None
    inner = getattr(function, "__func__", function)
    return f"{getattr(inner, '__module__', '?')}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"
