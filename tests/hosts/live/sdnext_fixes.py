"""An extension of SD.Next for these tests: reaches features that its API, a CPU or a machine without a network bar.

Copied into the `extensions` of a data directory. Nothing of it changes what the UNet computes.
"""

import functools
from pathlib import Path
from types import SimpleNamespace

import modules.hidiffusion as hidiffusion
import torch
from diffusers.hooks import group_offloading
from diffusers.loaders import lora_base
from modules import paths, sd_detect, sd_hijack_freeu, sd_vae, shared
from modules.control.units import detect, t2iadapter

# T2I-Adapters are known by their names on the hub alone
t2iadapter.all_models["tiny"] = (str(Path(paths.models_path) / "t2i-tiny"), {"use_safetensors": True})

# FreeU stays out if its Fourier transform runs on the torch.device "cpu"; to the comparison a str is another
sd_hijack_freeu.get_fft_device = lambda: "cpu"

# PAG asks about the class of the pipeline, and is answered about the class of that class
detect.is_compatible = lambda model, pattern="None": (
    model is not None and (model if isinstance(model, type) else type(model)).__name__.startswith(pattern)
)

# HiDiffusion, applied after ToMe even if it is off, takes ToMe's classes for its own and undoes them
_unapply = hidiffusion.unapply
hidiffusion.unapply = lambda: None if getattr(shared.sd_model, "applied_tome", 0) else _unapply()

# to make groups of layers, diffusers asks torch for the kind of its GPU
if torch.accelerator.current_accelerator() is None:
    _in_group = group_offloading.ModuleGroup.__init__

    @functools.wraps(_in_group)
    def _without_gpu(*args, **kwargs):
        asked = torch.accelerator.current_accelerator
        torch.accelerator.current_accelerator = lambda: torch.device("cpu")
        try:
            _in_group(*args, **kwargs)
        finally:
            torch.accelerator.current_accelerator = asked

    group_offloading.ModuleGroup.__init__ = _without_gpu

# offline, diffusers refuses a LoRA file whose name it is not told
lora_base.HF_HUB_OFFLINE = False

# a VAE in a folder is given its config twice
sd_vae.sd_detect = SimpleNamespace(detect_pipeline=sd_detect.detect_pipeline, get_load_config=lambda *_, **__: None)
