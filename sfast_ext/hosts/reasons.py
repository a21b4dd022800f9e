"""The table of the reasons that hosts give; see `sfast_ext.reasons`. Each says what is on, then what to do about it."""

from __future__ import annotations

from sfast_ext.reasons import Kind, rows

# fmt: off
OFF = "turn it off to accelerate"

UNSERVED = Kind("unserved", "this WebUI lacks what Stable Fast relies on: {}")
SWITCHED_OFF = Kind("switched-off", "Stable Fast is switched off in the settings")
RUNS_LAYERS = Kind("runs-layers-itself", "{} replaces the model's forward and calls none of its blocks",
    "turn that extension off to accelerate")

SD_UNET = Kind("other-sd-unet", "another UNet is active: {}",
    "set Settings > Stable Diffusion > SD Unet to None to accelerate")
LOWVRAM = Kind("lowvram", "--lowvram moves the weights to the GPU block by block",
    "--medvram is accelerated, if your images fit")
FP8 = Kind("fp8", "FP8 weight storage is on", "disable FP8 weight in Settings > Optimizations to accelerate")
HYPERNETWORK = Kind("hypernetwork", "a hypernetwork is active: {}", "remove it from the prompt to accelerate")
LORA_OLD_METHOD = Kind("lora-inside-layers", "LoRA is computed inside the layers",
    "turn off 'Lora/Networks: use old method' in Settings > Compatibility to accelerate")
LORA_UNKNOWN = Kind("lora-inside-layers", "the extension Lora works in a way that is not known: {}",
    "turn it off in Extensions > Installed to accelerate")
TOKEN_MERGING = Kind("token-merging", "token merging is on",
    "set its ratio to 0 in Settings > Optimizations to accelerate")
HYPERTILE = Kind("hypertile", "Hypertile is on and draws its tiles at random",
    "turn it off in Settings > Hypertile to accelerate")
PATCH_ON = Kind("another-extension", "{} is on", OFF)

IN_PARTS = Kind("offload", "Forge keeps a part of the UNet in system memory, for want of GPU memory",
    "a smaller image or model is accelerated")
IN_PARTS_FIRST = Kind("offload", "the first image in 8 bits needs {} GB of GPU memory, and {} are free: Forge keeps a "
    "part of the UNet in system memory", "close other programs that use the GPU to accelerate")
IN_PARTS_SHORT = Kind("offload", "GPU memory ran out with all of the UNet: Forge keeps a part of it in system memory",
    "close other programs that use the GPU, and load the model again, to accelerate")
LORA_IN_FP16 = Kind("lora-inside-layers", "LoRA is computed inside the layers",
    "set Diffusion in Low Bits to a choice without 'fp16 LoRA' to accelerate")
STORED_IN = Kind("quantised", "the model is quantised or stored in {}",
    "set Diffusion in Low Bits to Automatic, and load a model in half precision, to accelerate")
STORED_IN_KINDS = Kind("quantised", "the model is quantised or stored in {}",
    "load one that is not quantised to accelerate")
INSIDE = Kind("attention-features", "{} works inside the UNet", OFF)
OPTION_INSIDE = Kind("attention-features", "{}, an option that an extension has set, works inside the UNet", OFF)
CALL_REPLACED = Kind("compiled", "another function is in the place of the model's own call, torch.compile perhaps", OFF)
NO_UNET = Kind("no-unet", "{} has no UNet, and no transformer that is accelerated",
    "load a Stable Diffusion 1 or XL, Anima, Lumina 2, Z-Image, Chroma or Flux model to accelerate")
ONLY_UNETS = Kind("no-unet", "{} has no UNet", "load a Stable Diffusion 1 or XL model to accelerate")

OTHER_OFFLOAD = "choose 'balanced' or 'none' in Settings > Model Offloading to accelerate"
OFFLOAD_BY_LAYERS = Kind("offload", "offload mode '{}' moves the weights to the GPU layer by layer", OTHER_OFFLOAD)
OFFLOAD_BY_LAYERS_STILL = Kind("offload",
    "SD.Next moves weights to the GPU layer by layer, as offload mode 'sequential' does",
    "choose another mode in Settings > Model Offloading, and restart SD.Next, to accelerate")
OFFLOAD_BY_GROUPS = Kind("offload", "offload mode '{}' moves the weights to the GPU group by group", OTHER_OFFLOAD)
OFFLOAD_WHOLE = Kind("offload",
    "offload mode '{}' moves the UNet off the GPU, and there is not enough free memory to keep it there", OTHER_OFFLOAD)
OFFLOAD_WHOLE_STILL = Kind("offload",
    "SD.Next moves the UNet off the GPU, as offload mode 'model' does, and there is not enough free memory to keep it "
    "there",
    "restart SD.Next to accelerate")
OFFLOAD_UNKNOWN = Kind("offload", "offload mode '{}' works in a way that is not known in this version",
    "choose 'none' in Settings > Model Offloading to accelerate")
OFFLOAD_OF_PARTS = Kind("offload", "parts of the UNet do not fit on the GPU and are moved there layer by layer",
    "raise the high watermark in Settings > Model Offloading to accelerate")
OFFLOAD_NO_ROOM = Kind("offload",
    "8 bits need {} GB of GPU memory, and {} are free: SD.Next moves parts of the UNet there layer by layer",
    "close other programs that use the GPU to accelerate")
OFFLOAD_NO_SYSTEM_ROOM = Kind("offload",
    "8 bits need {} GB of system memory, and {} are free: SD.Next moves parts of the UNet to the GPU layer by layer",
    "close other programs to accelerate")
OFFLOAD_SHORT = Kind("offload", "GPU memory ran out with all of the UNet: SD.Next moves parts of it layer by layer",
    "close other programs that use the GPU, and load the model again, to accelerate")
REFINER_MOVED = Kind("offload",
    "the refiner is moved off the GPU after each image, and there is no room to keep it there",
    "turn off the option diffusers_move_refiner if both models fit")
COMPILED = Kind("compiled", "SD.Next has compiled this model",
    "turn off Compile Model in Settings > Model Compile to accelerate")
QUANTISED = Kind("quantised", "the model is quantised ({})", "load one that is not quantised to accelerate")
NO_UNET_IN_PIPELINE = Kind("no-unet", "{} has no UNet, and no transformer that is accelerated",
    "load a Stable Diffusion 1, 2 or XL, Anima, Lumina 2, Z-Image, Chroma or Flux model to accelerate")
PAG = Kind("attention-features", "perturbed attention guidance (PAG) replaces attention processors between steps", OFF)
REFERENCE = Kind("attention-features", "the Reference unit keeps state in the layers", OFF)
SPARSE_ATTENTION = Kind("attention-features", "sparse attention chooses by content, and by the step, what is computed",
    OFF)
LINFUSION = Kind("attention-features", "LinFusion replaces the attention layers",
    "turn it off and load the model again to accelerate")
T_GATE = Kind("step-cache", "T-Gate skips computations after some step", OFF)
DEEPCACHE = Kind("step-cache", "DeepCache skips parts of the UNet",
    "turn it off in Settings > Model Compile to accelerate")
LORA_BY_DIFFUSERS = Kind("lora-inside-layers", "LoRA is loaded by diffusers, which adds layers",
    "turn off 'LoRA load using Diffusers method' in Settings > Networks to accelerate")
HYPERTILE_MODIFIER = Kind("hypertile", "HyperTile draws its tiles at random",
    "turn it off in Settings > Pipeline Modifiers to accelerate")
MERGING_CLASSES = Kind("token-merging", "token merging (ToMe) or HiDiffusion replaces the classes of layers", OFF)
MERGING_BY_STEP = Kind("token-merging", "token merging (ToDo) depends on the number of the step", OFF)
DIFFUSERS_HOOKS = Kind("diffusers-hooks",
    "diffusers has put hooks on layers (group offload, layerwise casting or a cache)",
    "turn that feature off and load the model again to accelerate")

NO_EIGHT = "turn 8 bits off if that shows"
FEW_STEPS = Kind("eight-bits", "8 bits and few steps ({}): each step counts for more, so details change more",
    "take more than 8 steps, or " + NO_EIGHT)
FEW_STEP_MODEL = Kind("eight-bits", "8 bits and {}, which is made for few steps: details change more", NO_EIGHT)
FEW_STEP_SAMPLER = Kind("eight-bits",
    "8 bits and the sampler or schedule {}, which is made for few steps: details change more", NO_EIGHT)

TABLE = rows(list(globals().values()))
