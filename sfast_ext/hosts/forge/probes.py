"""What the adapter relies on in the programs that are called Forge, see `sfast_ext.hosts.probes`."""

from __future__ import annotations

from sfast_ext.hosts.probes import Feature, Probe, passes, probe, refers_to, takes
from sfast_ext.hosts.webui_probes import MEMORY, UPSCALED, VERSION, WEBUI

CONTROLNET = Feature("ControlNet", "ControlNets are not accelerated")
RESIDENT = Feature(
    "8-bit weights alone", "8 bits need GPU memory for a second copy of the weights on small cards as well"
)
VAE_ROOM = Feature("a VAE's memory", "Forge moves models off the GPU for a VAE that needs less memory in a plan")
LORA_NAMES = Feature("names of weights", "a change of LoRA takes longer with 8 bits on a small card")

_FORGE: tuple[Probe, ...] = (
    *WEBUI,
    probe("modules_forge.forge_version:version", feature=VERSION),
    probe("modules.sd_models:model_data"),
    probe("modules.upscaler:Upscaler.upscale", check=passes("self"), feature=(MEMORY, UPSCALED)),
)


def _management(module: str) -> tuple[Probe, ...]:
    return (
        probe(f"{module}:free_memory", check=passes("memory_required"), feature=MEMORY),
        probe(f"{module}:unload_all_models", check=passes(), feature=MEMORY),
        probe(f"{module}:get_free_memory", check=takes("dev"), feature=MEMORY),
    )


def _loads_in_parts(module: str) -> tuple[Probe, ...]:
    """ComfyUI's patcher of 2025 and later, which loads layers one by one."""
    return (
        probe(f"{module}:ModelPatcher.load", check=passes("self", "device_to", later=["full_load"]), feature=MEMORY),
        probe(f"{module}:ModelPatcher.partially_unload", check=passes("self"), feature=MEMORY),
        probe(f"{module}:ModelPatcher.add_patches", check=passes("self"), feature=MEMORY),
    )


def _controlnet(module: str) -> Probe:
    return probe(f"{module}:ControlNet", check=refers_to("control_model", "previous_controlnet"), feature=CONTROLNET)


def _resident(patcher: str, management: str, *own: str) -> tuple[Probe, ...]:
    """What `resident.ResidentUnet` wraps and calls.

    Args:
        own: attributes that this program alone has.
    """
    attributes = (
        "model_loaded_weight_memory", "patches_uuid", "current_weight_patches_uuid", "patches", "offload_device",
        "force_cast_weights", "weight_wrapper_patches", "weight_inplace_update", "backup", *own,
    )  # fmt: skip
    checks = {
        "partially_load": passes("self", "device_to", "extra_memory"),
        "partially_unload": passes("self", "device_to", "memory_to_free"),
        "load": passes("self", "device_to", later=["lowvram_model_memory", "full_load"]),
        "patch_weight_to_device": passes("self", "key", "device_to"),
        "unpatch_model": takes("self", "device_to", unpatch_weights=True),
        "loaded_size": passes("self"),
    }
    return (
        probe(f"{patcher}:ModelPatcher", check=refers_to(*attributes), feature=RESIDENT),
        *(probe(f"{patcher}:ModelPatcher.{name}", check=each, feature=RESIDENT) for name, each in checks.items()),
        probe(
            f"{management}:LoadedModel",
            check=refers_to("partially_load", "partially_unload", "loaded_size"),
            feature=RESIDENT,
        ),
        probe(f"{management}:LoadedModel.model_memory", check=passes("self"), feature=RESIDENT),
        probe(f"{management}:LoadedModel.model_offloaded_memory", check=passes("self"), feature=RESIDENT),
        probe(f"{management}:current_loaded_models", feature=(RESIDENT, VAE_ROOM)),
    )


def _vae_room(vae: str, management: str) -> tuple[Probe, ...]:
    """What `vae_room.VaeRoom` wraps and calls."""
    return (
        probe(f"{management}:free_memory", check=takes("memory_required", "device", "keep_loaded"), feature=VAE_ROOM),
        probe(f"{management}:load_models_gpu", check=passes("models", "memory_required"), feature=VAE_ROOM),
        probe(f"{vae}:VAE", check=refers_to("first_stage_model", "vae_dtype", "device", "patcher"), feature=VAE_ROOM),
        probe(f"{vae}:VAE.decode", check=passes("self", "samples_in"), feature=VAE_ROOM),
        probe(f"{vae}:VAE.encode", check=passes("self", "pixel_samples"), feature=VAE_ROOM),
    )


_LOADED_IN_PARTS = ("model_lowvram", "current_weight_patches_uuid", "weight_function")
_BACKEND, _LDM = "backend.memory_management", "ldm_patched.modules.model_management"
_LDM_PATCHER = "ldm_patched.modules.model_patcher"

NEO: tuple[Probe, ...] = (
    *_FORGE,
    probe("backend.patcher.base:ModelPatcher", check=refers_to(*_LOADED_IN_PARTS)),
    *_management(_BACKEND),
    *_loads_in_parts("backend.patcher.base"),
    probe("backend.patcher.base:ModelPatcher.unpin_all_weights", check=takes("self"), feature=MEMORY),
    *_resident("backend.patcher.base", _BACKEND, "forge_patched_weights"),
    probe("backend.patcher.base:ModelPatcher.has_online_lora", check=takes("self"), feature=RESIDENT),
    *_vae_room("backend.patcher.vae", _BACKEND),
    # of the extension for LoRA, which is built in
    probe("networks:model_lora_keys_unet", check=passes("model"), feature=LORA_NAMES),
    _controlnet("backend.patcher.controlnet"),
)

_WHOLE = {
    f"{_BACKEND}:load_models_gpu": passes("models", "memory_required", "hard_memory_preservation"),
    f"{_BACKEND}:free_memory": passes("memory_required", "device", "keep_loaded"),
    f"{_BACKEND}:LoadedModel.compute_inclusive_exclusive_memory": passes("self"),
    f"{_BACKEND}:LoadedModel.model_load": passes("self", ""),
    f"{_BACKEND}:LoadedModel.model_unload": takes("self"),
    f"{_BACKEND}:LoadedModel": refers_to(
        "real_model", "inclusive_memory", "exclusive_memory", "forge_patch_model", "refresh_loras"
    ),
    f"{_BACKEND}:minimum_inference_memory": takes(),
    f"{_BACKEND}:compute_model_gpu_memory_when_using_cpu_swap": takes("current_free_mem", "inference_memory"),
    "backend.patcher.base:ModelPatcher": refers_to("object_patches", "object_patches_backup", "offload_device"),
    "backend.patcher.base:ModelPatcher.forge_patch_model": passes("self", "target_device"),
    "backend.patcher.base:ModelPatcher.has_online_lora": takes("self"),
    "backend.patcher.lora:LoraLoader": refers_to("merge_lora_to_weight", "offload_device", "backup"),
    "backend.patcher.lora:merge_lora_to_weight": passes("patches", "weight"),
}
"""What `resident_models.ResidentModels` wraps and calls."""

FORGE: tuple[Probe, ...] = (
    *_FORGE,
    probe("backend.patcher.base:ModelPatcher", check=refers_to("lora_patches", "lora_loader")),
    probe(
        "backend.patcher.lora:LoraLoader",
        check=refers_to("loaded_hash", "backup", "forge_online_loras"),
    ),
    probe(f"{_BACKEND}:LoadedModel", check=refers_to("prev_parameters_manual_cast", "parameters_manual_cast")),
    *_management(_BACKEND),
    probe(f"{_BACKEND}:LoadedModel.model_load", check=passes("self", ""), feature=MEMORY),
    *(probe(place, check=check, feature=RESIDENT) for place, check in _WHOLE.items()),
    probe(f"{_BACKEND}:current_loaded_models", feature=(RESIDENT, VAE_ROOM)),
    *_vae_room("backend.patcher.vae", _BACKEND),
    # of the extension for LoRA, which is built in
    probe("networks:model_lora_keys_unet", check=passes("model"), feature=LORA_NAMES),
    _controlnet("backend.patcher.controlnet"),
)

_CAST = ("ldm_patched_cast_weights", "prev_ldm_patched_cast_weights")

CLASSIC: tuple[Probe, ...] = (
    *_FORGE,
    probe(f"{_LDM}:LoadedModel", check=refers_to(*_CAST)),
    probe(f"{_LDM_PATCHER}:ModelPatcher", check=refers_to("patches", "backup", "offload_device")),
    *_management(_LDM),
    probe(f"{_LDM}:module_size", check=passes("module"), feature=MEMORY),
    probe(f"{_LDM}:LoadedModel.model_load", check=passes("self", "async_kept_memory"), feature=MEMORY),
    probe(f"{_LDM_PATCHER}:ModelPatcher.patch_model", check=passes("self"), feature=MEMORY),
    _controlnet("ldm_patched.modules.controlnet"),
)

REFORGE: tuple[Probe, ...] = (
    *_FORGE,
    probe(f"{_LDM_PATCHER}:ModelPatcher", check=refers_to(*_LOADED_IN_PARTS, *_CAST)),
    *_management(_LDM),
    probe(f"{_LDM}:module_size", check=passes("module"), feature=MEMORY),
    *_loads_in_parts(_LDM_PATCHER),
    *_resident(
        _LDM_PATCHER,
        _LDM,
        "ldm_patched_patched_weights",
        "hook_patches",
        "forced_hooks",
        "current_hooks",
        "callbacks",
        "injections",
    ),
    *_vae_room("ldm_patched.modules.sd", _LDM),
    probe("ldm_patched.modules.lora:model_lora_keys_unet", check=passes("model"), feature=LORA_NAMES),
    _controlnet("ldm_patched.modules.controlnet"),
)
