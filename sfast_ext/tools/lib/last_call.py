"""How far an accelerated network is from the original for the call that the original got last."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn

from sfast_ext.call_signature import flatten_output
from sfast_ext.runtime.verify import relative_error


class LastCall:
    """Keeps the arguments and the result of a module's last call within a `with` block."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._calls: deque[Any] = deque(maxlen=1)

    def __enter__(self) -> LastCall:
        def keep(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            self._calls.append((args, kwargs, result))

        self._hook = self._module.register_forward_hook(keep, with_kwargs=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self._hook.remove()

    def error_of(self, other: nn.Module) -> float:
        """The relative error of another module's result for the same arguments. Infinite if there was no call."""
        if not self._calls:
            return float("inf")
        args, kwargs, result = self._calls[-1]
        with torch.inference_mode():
            return relative_error(*(flatten_output(each)[1] for each in (other(*args, **kwargs), result)))
