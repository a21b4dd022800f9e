"""Times what a WebUI does for an image: `hosts.py` copies this file into an extension of its own.

    POST /sfast-probe/start    begins
    POST /sfast-probe/stop     answers {"phases": [[name, begin, end], …], "busy": [[begin, end], …]}
    POST /sfast-probe/count    from now on the UNet's memory is counted at the last step of each image
    POST /sfast-probe/memory   answers {"bytes": what torch has reserved of the GPU at most since the last one,
                               "unet": what AUTOMATIC1111's UNet had of it then, its weights in 8 bits included}

Times are nanoseconds since 1970. Phases are calls of the functions below, which contain each other; of one thread, as
the WebUI makes one image at a time. `busy` are the times in which the GPU ran anything, by CUPTI; empty without one.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import time
from typing import Any

import torch
from fastapi import FastAPI
from modules import script_callbacks

# phase, module, function or method
A1111 = [
    ("process_images", "modules.processing", "process_images_inner"),
    ("text encoders", "modules.processing", "StableDiffusionProcessing.setup_conds"),
    ("text encoders", "modules.processing", "StableDiffusionProcessingTxt2Img.calculate_hr_conds"),
    ("sampler", "modules.sd_samplers_kdiffusion", "KDiffusionSampler.sample"),
    ("sampler", "modules.sd_samplers_kdiffusion", "KDiffusionSampler.sample_img2img"),
    ("guidance", "modules.sd_samplers_cfg_denoiser", "CFGDenoiser.forward"),
    ("UNet", "ldm.models.diffusion.ddpm", "DiffusionWrapper.forward"),
    ("UNet", "sgm.modules.diffusionmodules.wrappers", "OpenAIWrapper.forward"),
    ("live preview", "modules.sd_samplers_common", "store_latent"),
    ("VAE", "modules.processing", "decode_latent_batch"),
    ("VAE", "modules.processing", "images_tensor_to_samples"),
    ("NaN check", "modules.devices", "test_for_nans"),
    ("torch_gc", "modules.devices", "torch_gc"),
    ("extra networks", "modules.extra_networks", "activate"),
    ("saving", "modules.images", "save_image"),
    ("PNG and base64", "modules.api.api", "encode_pil_to_base64"),
]
SDNEXT = [
    ("process_images", "modules.processing", "process_images_inner"),
    # a wrapper of the UNet's own call would be a foreign function, which it is not accelerated with
    ("UNet, guidance, sampler", "modules.processing_diffusers", "process_base"),
    ("UNet, guidance, sampler", "modules.processing_diffusers", "process_hires"),
    ("arguments of the pipeline", "modules.processing_diffusers", "set_pipeline_args"),
    ("text encoders", "modules.prompt_parser_diffusers", "PromptEmbedder.__init__"),
    ("weights to the GPU", "modules.sd_offload", "OffloadHook.pre_forward"),
    ("weights to system memory", "modules.sd_models", "apply_balanced_offload"),
    ("callback of a step, live preview", "modules.processing_args", "diffusers_callback"),
    ("VAE", "modules.processing_vae", "vae_decode"),
    ("VAE", "modules.processing_vae", "vae_encode"),
    ("torch_gc", "modules.devices", "torch_gc"),
    ("extra networks", "modules.extra_networks", "activate"),
    ("PNG and base64", "modules.api.helpers", "encode_pil_to_base64"),
]
FORGE = [
    *(phase for phase in A1111 if phase[0] not in ("UNet", "NaN check")),
    # its UNet's own call may be no other function, see `SDNEXT`
    ("weights to the GPU", "modules.sd_samplers_kdiffusion", "sampling_prepare"),
]
PHASES = A1111
if importlib.util.find_spec("modules.processing_diffusers"):
    PHASES = SDNEXT
elif importlib.util.find_spec("modules_forge"):
    PHASES = FORGE
phases: list[tuple[str, int, int]] = []
profiler: list[torch.profiler.profile] = []
unet_bytes: list[int] = []
"""Once it is asked for: to count takes milliseconds."""
asked: list[bool] = []


def timed(name: str, function: Any) -> Any:
    @functools.wraps(function)
    def timed_call(*args: Any, **kwargs: Any) -> Any:
        if not profiler:
            return function(*args, **kwargs)
        began = time.time_ns()
        try:
            return function(*args, **kwargs)
        finally:
            phases.append((name, began, time.time_ns()))

    return timed_call


def wrap() -> None:
    for name, module, path in PHASES:
        home = importlib.import_module(module)
        *owner, attribute = path.split(".")
        for each in owner:
            home = getattr(home, each)
        setattr(home, attribute, timed(name, getattr(home, attribute)))


def busy(profile: torch.profiler.profile) -> list[list[int]]:
    """The times of kernels, copies and fills on the GPU, joined where they touch."""
    events = profile.profiler.kineto_results.events()
    cuda = torch.autograd.DeviceType.CUDA
    spans = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.device_type() == cuda)
    joined: list[list[int]] = []
    for begin, end in spans:
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return joined


def count_unet(params: Any) -> None:
    # in the last step alone, whose number is that of the one before still: it is a part of a timed image
    if not asked or params.sampling_step + 2 < params.total_sampling_steps:
        return
    from modules import shared

    unet = shared.sd_model.model.diffusion_model
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in unet.parameters() if t.is_cuda}
    banks = 0
    if importlib.util.find_spec("sfast_ext"):
        from sfast_ext.accelerator import accelerator_of

        accelerator = accelerator_of(unet)
        banks = 0 if accelerator is None else accelerator.arena.banks.held
    unet_bytes.append(sum(held.values()) + banks)


def unet_alone() -> None:
    """Forge's ControlNets by its own forward. There is no such setting."""
    from sfast_ext.hosts.forge.secondary import SecondaryNetworks

    SecondaryNetworks.follow_controlnets = lambda *_, **__: None  # type: ignore[method-assign]


def add_routes(_: Any, app: FastAPI) -> None:
    wrap()
    if os.environ.get("SFAST_PROBE_UNET_ALONE") and importlib.util.find_spec("sfast_ext"):
        unet_alone()

    @app.post("/sfast-probe/start")
    def start() -> dict[str, Any]:
        activity = torch.profiler.ProfilerActivity
        kinds = [activity.CUDA] if torch.cuda.is_available() else [activity.CPU]
        phases.clear()
        profiler.append(torch.profiler.profile(activities=kinds))
        profiler[0].start()
        return {}

    @app.post("/sfast-probe/stop")
    def stop() -> dict[str, Any]:
        profile = profiler.pop()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profile.stop()
        return {"phases": phases, "busy": busy(profile) if torch.cuda.is_available() else []}

    @app.post("/sfast-probe/memory")
    def memory() -> dict[str, Any]:
        if not torch.cuda.is_available():
            return {"bytes": 0, "unet": 0}
        most = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        return {"bytes": most, "unet": unet_bytes[-1] if unet_bytes else 0}

    @app.post("/sfast-probe/count")
    def count() -> dict[str, Any]:
        asked.append(True)
        return {}


if PHASES is A1111:
    script_callbacks.on_cfg_denoised(count_unet)
script_callbacks.on_app_started(add_routes)
