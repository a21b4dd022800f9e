"""Large models in a moment: their parameters are not initialised."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def uninitialised() -> Iterator[None]:
    """Modules that are made here have parameters of any values: those of SDXL would take a minute."""
    init = torch.nn.init
    names = [name for name in vars(init) if name.endswith("_") and not name.startswith("__")]
    before = {name: getattr(init, name) for name in names}
    try:
        for name in names:
            setattr(init, name, lambda tensor, *args, **kwargs: tensor)
        yield
    finally:
        for name, function in before.items():
            setattr(init, name, function)
