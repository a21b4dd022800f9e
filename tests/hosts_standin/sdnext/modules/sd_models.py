"""Loading and unloading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modules import script_callbacks, sd_offload
from modules.modeldata import model_data


def load_model(pipe: Any) -> None:
    """The model takes its place, offload hooks are set, and the callback comes last."""
    unload_model_weights(op="model")
    model_data.sd_model = pipe
    sd_offload.apply_balanced_offload(pipe)
    script_callbacks.fire("model_loaded", pipe)


def load_refiner(pipe: Any) -> None:
    """A second model, beside the first."""
    unload_model_weights(op="refiner")
    model_data.sd_refiner = pipe
    script_callbacks.fire("model_loaded", pipe)


def reload_model_weights(load: Callable[[], Any]) -> None:
    """A switch of the checkpoint: the old weights go, another pipeline object comes; nothing where loading fails."""
    unload_model_weights(op="model")
    load_model(load())


def unload_model_weights(op: str = "model") -> None:
    """The weights go to no device at all; no callback."""
    if op in ("model", "dict") and model_data.sd_model is not None:
        sd_offload.disable_offload(model_data.sd_model)
        model_data.sd_model.unet.to("meta")
        model_data.sd_model = None
    if op == "refiner" and model_data.sd_refiner is not None:
        model_data.sd_refiner.unet.to("meta")
        model_data.sd_refiner = None
