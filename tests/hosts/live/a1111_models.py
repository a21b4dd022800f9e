"""Tiny random models for a real WebUI: run by the WebUI's interpreter, in its directory, with the directory to fill.

    python a1111_models.py OUT [full | full-xl | full-pair]

writes Stable-diffusion/, clip/, Lora/ (see `a1111_loras.py`), ControlNet/, VAE/, hypernetworks/ and embeddings/. The
two checkpoints called tiny share tiny.yaml, so that the WebUI sees one configuration and loads the second into the
modules of the first; wide is another architecture, deep has 320 channels where FreeU looks for them, inpaint takes 9
channels and edit 8. Those of `a1111_xl.py` are added. With `full` it writes one checkpoint as large as SD 1.5 and its
text model instead, full.safetensors in fp16; with `full-xl` one as large as SDXL; with `full-pair` full.safetensors,
full-other.safetensors of the same architecture, and LoRAs that fit both.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

CONTEXT = 64
IMAGE = 48  # channels of what a model of vision tells an IP-Adapter of an image
# name, width, channels of the input, the WebUI's own configuration, how many times as wide each level is
CHECKPOINTS = [
    ("tiny", 32, 4, "v1-inference.yaml", [1, 2, 4, 4]),
    ("wide", 64, 4, "v1-inference.yaml", [1, 2, 4, 4]),
    ("deep", 32, 4, "v1-inference.yaml", [1, 2, 4, 10]),
    ("inpaint", 32, 9, "v1-inpainting-inference.yaml", [1, 2, 4, 4]),
    ("edit", 32, 8, "instruct-pix2pix.yaml", [1, 2, 4, 4]),
]


def write_clip(folder: Path, width: int = CONTEXT, layers: int = 2, heads: int = 4) -> None:
    """A text model and a tokenizer that knows single bytes only: neither needs a download."""
    from transformers import CLIPTextConfig, CLIPTextModel
    from transformers.models.clip.tokenization_clip import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    start, end = len(tokens) - 2, len(tokens) - 1
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 77}), encoding="utf-8")
    config = CLIPTextConfig(
        vocab_size=len(tokens),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=77,
        bos_token_id=start,
        eos_token_id=end,
        pad_token_id=end,
    )
    CLIPTextModel(config).save_pretrained(folder)


def shrink(config, clip: Path, channels: int, levels: list[int]):
    """One of the WebUI's own configurations, made small."""
    params = config.model.params
    params.unet_config.params.update(model_channels=channels, channel_mult=levels, num_heads=4, context_dim=CONTEXT)
    params.first_stage_config.params.ddconfig.update(ch=32, num_res_blocks=1)
    params.cond_stage_config.params = {"version": str(clip)}
    return config


def randomise(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Weights that keep activations near one through the whole net; ldm itself starts residual branches at zero."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(where).manual_seed(seed)
    state = {}
    for name, value in model.state_dict().items():
        ours = name.startswith(("model.diffusion_model.", "first_stage_model.", "cond_stage_model.", "conditioner."))
        if not ours or not value.is_floating_point():
            state[name] = value.clone()
            continue
        noise = torch.randn(value.shape, generator=generator, device=where).to(value.device)
        if value.dim() > 1:
            state[name] = noise * value[0].numel() ** -0.5
        elif name.endswith("weight"):
            state[name] = 1 + 0.1 * noise
        else:
            state[name] = 0.05 * noise
    return state


def control(
    state: dict[str, torch.Tensor], seed: int, levels: tuple[int, ...] = (1, 1, 1, 1, 2, 2, 2, 4, 4, 4, 4, 4)
) -> dict[str, torch.Tensor]:
    """A ControlNet beside the UNet of `state`: its encoder and middle, the encoder of the hint, and the ways out."""
    generator = torch.Generator().manual_seed(seed)
    width = state["model.diffusion_model.input_blocks.0.0.weight"].shape[0]
    copied = ("time_embed.", "label_emb.", "input_blocks.", "middle_block.")
    tensors = {
        name: value.clone()
        for name, value in ((k.removeprefix("model.diffusion_model."), v) for k, v in state.items())
        if name.startswith(copied)
    }
    hint = [3, 16, 16, 32, 32, 96, 96, 256, width]
    for i, (into, out) in enumerate(zip(hint, hint[1:])):
        convolution(tensors, f"input_hint_block.{2 * i}", out, into, 3, generator)
    for i, times in enumerate(levels):
        convolution(tensors, f"zero_convs.{i}.0", times * width, times * width, 1, generator)
    convolution(tensors, "middle_block_out.0", 4 * width, 4 * width, 1, generator)
    return {f"control_model.{name}": value for name, value in tensors.items()}


def adapter(width: int, seed: int) -> dict[str, torch.Tensor]:
    """A T2I-Adapter: two residual blocks for each level of the UNet, from the image's pixels in 8 by 8 squares."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    convolution(tensors, "conv_in", width, 192, 3, generator)
    into = width
    for level, times in enumerate([1, 2, 4, 4]):
        for block in (2 * level, 2 * level + 1):
            out = times * width
            if into != out:
                convolution(tensors, f"body.{block}.in_conv", out, into, 1, generator)
            convolution(tensors, f"body.{block}.block1", out, out, 3, generator)
            convolution(tensors, f"body.{block}.block2", out, out, 1, generator)
            into = out
    return tensors


def ip_adapter(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """An IP-Adapter: an image's embedding as four tokens, and keys and values of them for each cross attention."""
    generator = torch.Generator().manual_seed(seed)

    def linear(out: int, into: int) -> torch.Tensor:
        return torch.randn((out, into), generator=generator) * into**-0.5

    tensors = {
        "image_proj.proj.weight": linear(4 * CONTEXT, IMAGE),
        "image_proj.proj.bias": torch.randn(4 * CONTEXT, generator=generator),
        "image_proj.norm.weight": torch.ones(CONTEXT),
        "image_proj.norm.bias": torch.zeros(CONTEXT),
    }
    blocks = [f"input_blocks.{i}" for i in (1, 2, 4, 5, 7, 8)] + [f"output_blocks.{i}" for i in range(3, 12)]
    for i, block in enumerate([*blocks, "middle_block"]):
        weight = state[f"model.diffusion_model.{block}.1.transformer_blocks.0.attn2.to_k.weight"]
        for part in ("k", "v"):
            tensors[f"ip_adapter.{2 * i + 1}.to_{part}_ip.weight"] = 2 * linear(*weight.shape)
    return tensors


def convolution(
    tensors: dict[str, torch.Tensor], name: str, out: int, into: int, size: int, generator: torch.Generator
) -> None:
    """Add the weight and bias of a convolution that keeps activations near one."""
    weight = torch.randn((out, into, size, size), generator=generator)
    tensors[f"{name}.weight"] = weight * (into * size * size) ** -0.5
    tensors[f"{name}.bias"] = 0.05 * torch.randn(out, generator=generator)


def hypernetwork(seed: int) -> dict[Any, Any]:
    """What the WebUI's hypernetworks are made of: two small networks in front of the keys and the values."""
    generator = torch.Generator().manual_seed(seed)

    def layers() -> dict[str, torch.Tensor]:
        wide, narrow = (2 * CONTEXT, CONTEXT), (CONTEXT, 2 * CONTEXT)
        weights = {"linear.0": wide, "linear.1": narrow}
        tensors = {f"{k}.weight": torch.randn(s, generator=generator) * s[1] ** -0.5 for k, s in weights.items()}
        return {**tensors, "linear.0.bias": torch.zeros(wide[0]), "linear.1.bias": torch.zeros(narrow[0])}

    return {CONTEXT: (layers(), layers()), "name": "hyper", "step": 1, "layer_structure": [1, 2, 1]}


def main(out: Path) -> None:
    sys.path[:0] = [str(Path.cwd() / "repositories" / "stable-diffusion-stability-ai")]
    import a1111_loras
    import a1111_xl
    from ldm.util import instantiate_from_config
    from omegaconf import OmegaConf
    from safetensors.torch import save_file

    checkpoints, clip = out / "Stable-diffusion", out / "clip"
    for folder in (checkpoints, *(out / name for name in ("VAE", "ControlNet", "hypernetworks", "embeddings"))):
        folder.mkdir(parents=True, exist_ok=True)
    write_clip(clip)
    for name, channels, inputs, template, levels in CHECKPOINTS:
        config = shrink(OmegaConf.load(f"configs/{template}"), clip, channels, levels)
        OmegaConf.save(config, checkpoints / f"{name}.yaml")
        # pix2pix' own class is the WebUI's; the weights have the same names
        config = shrink(OmegaConf.load("configs/v1-inference.yaml"), clip, channels, levels)
        config.model.params.unet_config.params.in_channels = inputs
        model = instantiate_from_config(config.model)
        state = randomise(model, seed=channels + inputs - 4)
        save_file(state, checkpoints / f"{name}.safetensors")
        if name == "tiny":
            other = randomise(model, seed=7)
            old_save({"state_dict": other}, checkpoints / "tiny.ckpt")
            vae = {k.removeprefix("first_stage_model."): v for k, v in other.items() if k.startswith("first_stage")}
            save_file(vae, out / "VAE" / "other.safetensors")
            save_file(control(state, seed=5), out / "ControlNet" / "tiny-control.safetensors")
            save_file(adapter(channels, seed=6), out / "ControlNet" / "tiny-t2i.safetensors")
            save_file(ip_adapter(state, seed=11), out / "ControlNet" / "tiny-ip-adapter.safetensors")
            a1111_loras.write(state, out / "Lora")
    a1111_xl.write(out, clip, randomise, a1111_loras.low_rank)
    old_save(hypernetwork(seed=8), out / "hypernetworks" / "hyper.pt")
    word = torch.randn((2, CONTEXT), generator=torch.Generator().manual_seed(9))
    save_file({"emb_params": word}, out / "embeddings" / "tinyword.safetensors")


def full(out: Path, which: str) -> None:
    """Checkpoints of random weights, as large as SD 1.5 or as SDXL, in fp16."""
    repositories = Path.cwd() / "repositories"
    sys.path[:0] = [str(repositories / "generative-models"), str(repositories / "stable-diffusion-stability-ai")]
    import a1111_loras
    import a1111_xl
    from ldm.util import instantiate_from_config
    from omegaconf import OmegaConf
    from safetensors.torch import save_file

    checkpoints = out / "Stable-diffusion"
    checkpoints.mkdir(parents=True, exist_ok=True)
    write_clip(out / "clip", width=768, layers=12, heads=12)
    if which == "full-xl":
        config = a1111_xl.full(out / "clip")
    else:
        config = OmegaConf.load("configs/v1-inference.yaml")
        config.model.params.cond_stage_config.params = {"version": str(out / "clip")}
    with uninitialised():
        model = instantiate_from_config(config.model)
    names = ("full", "full-other") if which == "full-pair" else (which,)
    for seed, name in enumerate(names, 1):
        OmegaConf.save(config, checkpoints / f"{name}.yaml")
        state = randomise(model, seed)
        half = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
        save_file(half, checkpoints / f"{name}.safetensors")
    if which == "full-pair":
        a1111_loras.write(state, out / "Lora", ("strong", "loha", "dora"))
        save_file(a1111_loras.network("strong", state, seed=6), out / "Lora" / "second.safetensors")


@contextlib.contextmanager
def uninitialised() -> Iterator[None]:
    """Modules that are made here have parameters of any values: those of SDXL would take a minute."""
    init = torch.nn.init
    names = [name for name in vars(init) if name.endswith("_") and not name.startswith("__")]
    before = {name: getattr(init, name) for name in names}
    try:
        for name in names:
            setattr(init, name, lambda tensor, *args, **kwargs: tensor)
        yield
    finally:
        for name, function in before.items():
            setattr(init, name, function)


def old_save(value: Any, path: Path) -> None:
    """In the older format: WebUI 1.10.1 takes what torch 2.7 adds to its zip files for something malicious."""
    torch.save(value, path, _use_new_zipfile_serialization=False)


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    if sys.argv[2:]:
        full(folder, sys.argv[2])
    else:
        main(folder)
