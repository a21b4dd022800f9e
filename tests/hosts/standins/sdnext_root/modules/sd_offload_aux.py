"""Models beside the pipeline, for captions and the like."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from modules import devices

aux_models: dict[str, Any] = {}


def register_aux(name: str, model: Any) -> None:
    """To be brought to the GPU when it is asked for."""
    aux_models[name] = SimpleNamespace(model=model)


def move_aux_to_gpu(name: str) -> None:
    """Bring it there."""
    aux_models[name].model.to(devices.device)
