"""What the adapter relies on in AUTOMATIC1111's WebUI, see `sfast_ext.hosts.probes`."""

from __future__ import annotations

from sfast_ext.hosts.probes import Check, Feature, Probe, every, has, passes, probe, refers_to, takes, without
from sfast_ext.hosts.webui_probes import MEMORY, PREVIEW_MEMORY, REQUESTS, UPSCALED, VERSION, WEBUI

UPSCALERS = Feature("upscalers", "GPU memory held for fast replays is not freed before an upscaler runs")

PROBES: tuple[Probe, ...] = (
    *WEBUI,
    *REQUESTS,
    without("modules_forge", "backend", "ldm_patched"),
    probe("modules.shared:device"),
    probe("modules.shared:loaded_hypernetworks"),
    probe("modules.devices", check=has("dtype_unet", "unet_needs_upcast")),
    probe("modules.sd_hijack:model_hijack", check=has("circular_enabled")),
    probe("modules.sd_unet:current_unet"),
    probe("modules.sd_models:model_data", check=has("sd_model", "loaded_sd_models")),
    probe("modules.sd_models:send_model_to_cpu", check=passes(""), feature=MEMORY),
    probe("modules.sd_models:send_model_to_trash", check=passes(""), feature=MEMORY),
    probe("modules.upscaler:Upscaler.upscale", check=passes("self"), feature=(UPSCALERS, UPSCALED)),
    probe("modules.sd_samplers_common:samples_to_images_tensor", check=passes("sample"), feature=PREVIEW_MEMORY),
    probe("modules.launch_utils:git_tag", check=takes(), feature=VERSION),
)


def _of_lora(check: Check) -> Check:
    """A check of Lora's code: another extension may have put something in its place."""
    return lambda function: check(function) if getattr(function, "__module__", None) == "networks" else None


LORA: tuple[Probe, ...] = (
    probe("networks:loaded_networks"),
    probe(
        "networks:network_apply_weights",
        check=every(
            takes("layer"),
            _of_lora(refers_to("network_layer_name", "network_current_names")),
            _of_lora(refers_to("te_multiplier", "unet_multiplier", "dyn_dim")),
        ),
    ),
)
"""Of the built-in extension Lora, which may be loaded later. While one of them is missing, calls are bypassed."""
