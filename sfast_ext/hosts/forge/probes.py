"""What the adapter relies on in Forge Neo and in Forge Classic, see `sfast_ext.hosts.probes`."""

from __future__ import annotations

from sfast_ext.hosts.probes import Feature, Probe, passes, probe, refers_to, takes
from sfast_ext.hosts.webui_probes import WEBUI, XYZ

MEMORY = Feature("memory", "GPU memory that plans hold is freed later than the WebUI needs it")

_FORGE: tuple[Probe, ...] = (
    *WEBUI,
    probe("modules_forge"),
    probe("modules.script_callbacks:on_cfg_denoiser", check=takes("callback")),
    probe("modules.sd_models:model_data"),
    probe("modules.sd_models:unload_model_weights", check=passes(), feature=MEMORY),
    probe("modules.upscaler:Upscaler.upscale", check=passes("self"), feature=MEMORY),
    probe("modules.scripts:scripts_data", feature=XYZ),
)

NEO: tuple[Probe, ...] = (
    *_FORGE,
    probe(
        "backend.patcher.base:ModelPatcher",
        check=refers_to("model_lowvram", "current_weight_patches_uuid", "weight_function"),
    ),
    probe("backend.memory_management:free_memory", check=passes("memory_required"), feature=MEMORY),
    probe("backend.memory_management:unload_all_models", check=passes(), feature=MEMORY),
    probe("backend.memory_management:get_free_memory", check=takes("dev"), feature=MEMORY),
    probe(
        "backend.patcher.base:ModelPatcher.load",
        check=passes("self", "device_to", later=["full_load"]),
        feature=MEMORY,
    ),
    probe("backend.patcher.base:ModelPatcher.partially_unload", check=passes("self"), feature=MEMORY),
    probe("backend.patcher.base:ModelPatcher.add_patches", check=passes("self"), feature=MEMORY),
    probe("backend.patcher.base:ModelPatcher.unpin_all_weights", check=takes("self"), feature=MEMORY),
)

_CAST = ("ldm_patched_cast_weights", "prev_ldm_patched_cast_weights")

CLASSIC: tuple[Probe, ...] = (
    *_FORGE,
    probe("ldm_patched.modules.model_management:LoadedModel", check=refers_to(*_CAST)),
    probe("ldm_patched.modules.model_patcher:ModelPatcher", check=refers_to("patches", "backup", "offload_device")),
    probe("ldm_patched.modules.model_management:free_memory", check=passes("memory_required"), feature=MEMORY),
    probe("ldm_patched.modules.model_management:unload_all_models", check=passes(), feature=MEMORY),
    probe("ldm_patched.modules.model_management:get_free_memory", check=takes("dev"), feature=MEMORY),
    probe("ldm_patched.modules.model_management:module_size", check=passes("module"), feature=MEMORY),
    probe(
        "ldm_patched.modules.model_management:LoadedModel.model_load",
        check=passes("self", "async_kept_memory"),
        feature=MEMORY,
    ),
    probe("ldm_patched.modules.model_patcher:ModelPatcher.patch_model", check=passes("self"), feature=MEMORY),
)
