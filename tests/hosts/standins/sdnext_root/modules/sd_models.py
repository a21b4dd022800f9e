"""Loading and unloading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from modules import devices, script_callbacks, sd_offload
from modules.modeldata import model_data


def load_model(pipe: Any) -> None:
    """The model takes its place, offload hooks are set, and the callback comes last."""
    unload_model_weights(op="model")
    model_data.sd_model = pipe
    sd_offload.set_diffuser_offload(pipe)
    move_model(pipe, devices.device)
    script_callbacks.fire("model_loaded", pipe)


def load_refiner(pipe: Any) -> None:
    """A second model, beside the first."""
    unload_model_weights(op="refiner")
    model_data.sd_refiner = pipe
    sd_offload.set_diffuser_offload(pipe)
    move_model(pipe, devices.device)
    script_callbacks.fire("model_loaded", pipe)


def reload_model_weights(load: Callable[[], Any]) -> None:
    """A switch of the checkpoint: the old weights go, another pipeline object comes; nothing if loading fails."""
    unload_model_weights(op="model")
    load_model(load())


def unload_model_weights(op: str = "model") -> None:
    """The weights go to no device at all; no callback."""
    sd_offload.forget_hook()
    if op in ("model", "dict") and model_data.sd_model is not None:
        sd_offload.disable_offload(model_data.sd_model)
        move_model(model_data.sd_model, "meta")
        model_data.sd_model = None
        devices.torch_gc(force=True, reason="unload")
    if op == "refiner" and model_data.sd_refiner is not None:
        sd_offload.disable_offload(model_data.sd_refiner)
        move_model(model_data.sd_refiner, "meta")
        model_data.sd_refiner = None
        devices.torch_gc(force=True, reason="unload")


def move_model(pipe: Any, device: Any) -> None:
    """All of a pipeline, unless its modules come and go by themselves."""
    if getattr(pipe, "has_accelerate", False):
        return
    for value in vars(pipe).values():
        if isinstance(value, nn.Module):
            value.to(device)
