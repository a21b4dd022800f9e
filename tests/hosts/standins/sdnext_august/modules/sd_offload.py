"""What other modules know of the offload: `move_module_to_cpu` is not among it."""

from __future__ import annotations

from typing import Any

from modules import devices, sd_offload_balanced, shared  # noqa: F401
from modules import sd_offload_group as group
from modules.modeldata import model_data
from modules.sd_offload_balanced import forget_hook


def apply_balanced_offload(pipe: Any, force: bool = False) -> None:
    """At loading and at each job."""
    if shared.opts.diffusers_offload_mode == "balanced" and pipe is not None:
        group.remove_group_offload(pipe)
    sd_offload_balanced.apply_balanced_offload(pipe, force)


def set_diffuser_offload(pipe: Any) -> None:
    """After a model was loaded: what its mode asks for."""
    if shared.opts.diffusers_offload_mode == "group":
        group.apply_group_offload(pipe)
    if shared.opts.diffusers_offload_mode == "none":
        group.remove_group_offload(pipe)
    apply_balanced_offload(pipe)


def reapply_offload() -> None:
    """After a setting of the offload was changed, without loading the model."""
    if shared.opts.diffusers_offload_mode == "group":
        group.apply_group_offload(model_data.sd_model)
    elif shared.opts.diffusers_offload_mode == "balanced":
        forget_hook()
        apply_balanced_offload(model_data.sd_model)


def disable_offload(pipe: Any) -> None:
    """Takes all hooks off."""
    group.remove_group_offload(pipe)
    sd_offload_balanced.disable_offload(pipe)
