"""Small random models for a real Forge of any kind: run by its interpreter, in its directory, with the directory to
fill.

    python forge_models.py OUT [small]

writes Stable-diffusion/, Lora/ and ControlNet/. Forge knows a model by its weights: width and context are those of SD
1.5, and so are the text model and the VAE, or all have the widths of `forge_small.py`. The UNets are shallow: one and
other are of one architecture, three has another level.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import forge_small
import torch

CONFIG = Path("backend/huggingface/runwayml/stable-diffusion-v1-5")
CHECKPOINTS = [("one", [1, 2], 1), ("other", [1, 2], 2), ("three", [1, 2, 2], 3)]
"""Name, how many times as wide each level is, seed."""


Make = Callable[..., torch.nn.Module]


def of_neo(config: Path = CONFIG) -> tuple[Make, torch.nn.Module, torch.nn.Module]:
    """What makes a UNet, the text model and the VAE, the last two as these files say."""
    # Forge Neo's flag, and Forge's
    sys.argv[1:] = ["--cpu", "--always-cpu"]
    packages = (Path.cwd() / "modules_forge" / "packages", Path.cwd() / "packages_3rdparty")
    sys.path[:0] = [str(Path.cwd()), *map(str, packages)]
    from backend.nn.unet import IntegratedUNet2DConditionModel
    from backend.nn.vae import IntegratedAutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModel

    text = CLIPTextModel(CLIPTextConfig.from_pretrained(config / "text_encoder"))
    vae = IntegratedAutoencoderKL.from_config(IntegratedAutoencoderKL.load_config(config / "vae"))
    return IntegratedUNet2DConditionModel, text, vae


def of_classic(small: bool = False) -> tuple[Make, torch.nn.Module, torch.nn.Module]:
    """The same, of the widths of `forge_small.py` if `small`."""
    sys.argv[1:] = []
    sys.path[:0] = [str(Path.cwd())]
    from ldm_patched.modules import args_parser

    args_parser.args.always_cpu = True
    if "sd_vae_tiled_ops" in Path("ldm_patched/ldm/modules/diffusionmodules/model.py").read_text(encoding="utf-8"):
        from modules import shared

        # Forge Classic's VAE asks it as it is read
        shared.opts = SimpleNamespace(sd_vae_tiled_ops=False)
    from ldm_patched.ldm.models.autoencoder import AutoencoderKL
    from ldm_patched.ldm.modules.diffusionmodules.openaimodel import UNetModel
    from ldm_patched.modules import ops
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig.from_json_file("ldm_patched/modules/sd1_clip_config.json").to_dict()
    text = CLIPTextModel(CLIPTextConfig(**{**config, **(forge_small.TEXT if small else {})}))
    ch = forge_small.VAE if small else 128
    sizes = {"resolution": 256, "in_channels": 3, "out_ch": 3, "ch": ch, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2}
    vae = AutoencoderKL(
        ddconfig={"double_z": True, "z_channels": 4, "attn_resolutions": [], "dropout": 0.0, **sizes}, embed_dim=4
    )
    unet = functools.partial(UNetModel, image_size=32, legacy=False, operations=ops.disable_weight_init)
    return unet, text, vae


def main(out: Path, checkpoints: Sequence[tuple[str, list[int], int]] = CHECKPOINTS, small: bool = False) -> None:
    if CONFIG.is_dir():
        make_unet, text, vae = of_neo(forge_small.write_files(CONFIG, out) if small else CONFIG)
    else:
        make_unet, text, vae = of_classic(small)
    width, context = (forge_small.WIDTH, forge_small.CONTEXT) if small else (320, 768)
    from safetensors.torch import save_file

    for folder in ("Stable-diffusion", "Lora", "ControlNet", "VAE", "text_encoder", "embeddings"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    parts = {
        **randomise("cond_stage_model.transformer.", text, 8),
        **randomise("first_stage_model.", vae, 9),
    }
    for name, levels, seed in checkpoints:
        depth = len(levels)
        unet = make_unet(
            in_channels=4,
            model_channels=width,
            out_channels=4,
            num_res_blocks=[1] * depth,
            channel_mult=levels,
            num_heads=8,
            use_spatial_transformer=True,
            transformer_depth=[1] * depth,
            transformer_depth_output=[1] * 2 * depth,
            transformer_depth_middle=1,
            context_dim=context,
        )
        weights = randomise("model.diffusion_model.", unet, seed)
        save_file({**weights, **parts}, out / "Stable-diffusion" / f"{name}.safetensors")
        if name == "one":
            save_file(lora(weights, 10), out / "Lora" / "strong.safetensors")
            save_file(lora(weights, 11), out / "Lora" / "second.safetensors")
            beside = control(weights, 12, (width, width, width, 2 * width))
            save_file(beside, out / "ControlNet" / "control.safetensors")


def randomise(prefix: str, model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Weights in half precision that keep activations near one."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(where).manual_seed(seed)
    state = {}
    for name, value in model.state_dict().items():
        if not value.is_floating_point():
            continue
        noise = torch.randn(value.shape, generator=generator, device=where)
        if value.dim() > 1:
            noise *= value[0].numel() ** -0.5
        elif name.endswith("weight"):
            noise = 1 + 0.1 * noise
        else:
            noise *= 0.05
        state[prefix + name] = noise.half().cpu()
    return state


def lora(weights: dict[str, torch.Tensor], seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    """One of every linear layer of attention in the UNet."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, value in weights.items():
        layer = name.removeprefix("model.diffusion_model.").removesuffix(".weight")
        if ".attn" not in layer or value.dim() != 2:
            continue
        key = f"lora_unet_{layer.replace('.', '_')}"
        out, into = value.shape
        tensors[f"{key}.lora_down.weight"] = torch.randn((rank, into), generator=generator) * into**-0.5
        tensors[f"{key}.lora_up.weight"] = torch.randn((out, rank), generator=generator)
        tensors[f"{key}.alpha"] = torch.tensor(float(rank))
    return tensors


def control(
    weights: dict[str, torch.Tensor], seed: int, widths: tuple[int, ...] = (320, 320, 320, 640)
) -> dict[str, torch.Tensor]:
    """A ControlNet beside the UNet, whose blocks of the encoder have these widths: its encoder and middle, the encoder
    of the hint, and the ways out."""
    generator = torch.Generator().manual_seed(seed)
    copied = ("time_embed.", "input_blocks.", "middle_block.")
    named = ((name.removeprefix("model.diffusion_model."), value) for name, value in weights.items())
    tensors = {name: value.float() for name, value in named if name.startswith(copied)}

    def convolution(name: str, out: int, into: int, size: int) -> None:
        tensors[f"{name}.weight"] = torch.randn((out, into, size, size), generator=generator) * (into * size**2) ** -0.5
        tensors[f"{name}.bias"] = 0.05 * torch.randn(out, generator=generator)

    hint = [3, 16, 16, 32, 32, 96, 96, 256, widths[0]]
    for i, (into, out) in enumerate(zip(hint, hint[1:])):
        convolution(f"input_hint_block.{2 * i}", out, into, 3)
    for i, width in enumerate(widths):
        convolution(f"zero_convs.{i}.0", width, width, 1)
    convolution("middle_block_out.0", widths[-1], widths[-1], 1)
    return {f"control_model.{name}": value for name, value in tensors.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), small=sys.argv[2:] == ["small"])
