"""Tiny random models for a real WebUI: run by the WebUI's interpreter, in its directory, with the directory to fill.

    python a1111_models.py OUT

writes Stable-diffusion/{tiny.safetensors,tiny.ckpt,tiny.yaml,wide.safetensors,wide.yaml}, clip/ and two files in
Lora/. The two checkpoints called tiny share tiny.yaml, so that the WebUI sees one configuration and loads the second
into the modules of the first; wide is another architecture. Lora/strong is of low rank, Lora/full brings
whole differences, of a bias too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

CONTEXT = 64
PARTS = [f"attn{i}.to_{what}" for i in (1, 2) for what in ("q", "k", "v", "out.0")] + ["ff.net.0.proj", "ff.net.2"]


def write_clip(folder: Path) -> None:
    """A text model of two layers and a tokenizer that knows single bytes only: neither needs a download."""
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
        hidden_size=CONTEXT,
        intermediate_size=2 * CONTEXT,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=start,
        eos_token_id=end,
        pad_token_id=end,
    )
    CLIPTextModel(config).save_pretrained(folder)


def shrink(config, clip: Path, channels: int):
    """The WebUI's own SD 1.5 configuration, made small."""
    params = config.model.params
    params.unet_config.params.update(model_channels=channels, num_heads=4, context_dim=CONTEXT)
    params.first_stage_config.params.ddconfig.update(ch=32, num_res_blocks=1)
    params.cond_stage_config.params = {"version": str(clip)}
    return config


def randomise(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Weights that keep activations near one through the whole net; ldm itself starts residual branches at zero."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, value in model.state_dict().items():
        ours = name.startswith(("model.diffusion_model.", "first_stage_model.", "cond_stage_model."))
        if not ours or not value.is_floating_point():
            state[name] = value.clone()
            continue
        noise = torch.randn(value.shape, generator=generator)
        if value.dim() > 1:
            state[name] = noise * value[0].numel() ** -0.5
        elif name.endswith("weight"):
            state[name] = 1 + 0.1 * noise
        else:
            state[name] = 0.05 * noise
    return state


def lora(state: dict[str, torch.Tensor], seed: int, strength: float) -> dict[str, torch.Tensor]:
    """A kohya-style LoRA on attention, feed-forward and convolutions of the first two levels and the middle."""
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for level in (0, 1):
        for i in (0, 1):
            block = 1 + 3 * level + i
            layers[f"lora_unet_down_blocks_{level}_resnets_{i}_conv1"] = f"input_blocks.{block}.0.in_layers.2"
            for part in PARTS:
                kohya = part.replace(".", "_")
                layers[f"lora_unet_down_blocks_{level}_attentions_{i}_transformer_blocks_0_{kohya}"] = (
                    f"input_blocks.{block}.1.transformer_blocks.0.{part}"
                )
    layers["lora_unet_mid_block_resnets_0_time_emb_proj"] = "middle_block.0.emb_layers.1"
    layers["lora_unet_mid_block_attentions_0_proj_in"] = "middle_block.1.proj_in"
    tensors = {}
    for key, path in layers.items():
        weight = state[f"model.diffusion_model.{path}.weight"]
        out, rest = weight.shape[0], weight.shape[1:]
        down = torch.randn((4, *rest), generator=generator) * (rest.numel() ** -0.5)
        up = torch.randn((out, 4, *([1] * (weight.dim() - 2))), generator=generator) * strength * 0.5
        tensors[f"{key}.lora_down.weight"] = down
        tensors[f"{key}.lora_up.weight"] = up
        tensors[f"{key}.alpha"] = torch.tensor(4.0)
    return tensors


def full(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Differences of whole weights, and of a bias where there is one: the WebUI cannot take back one that it added."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for part in ("attn1.to_q", "attn2.to_k", "attn2.to_out.0"):
        key = f"lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_{part.replace('.', '_')}"
        weight = state[f"model.diffusion_model.input_blocks.1.1.transformer_blocks.0.{part}.weight"]
        tensors[f"{key}.diff"] = torch.randn(weight.shape, generator=generator) * 0.2
        if part == "attn2.to_out.0":
            tensors[f"{key}.diff_b"] = torch.randn(weight.shape[0], generator=generator) * 2
    return tensors


def main(out: Path) -> None:
    sys.path[:0] = [str(Path.cwd() / "repositories" / "stable-diffusion-stability-ai")]
    from ldm.util import instantiate_from_config
    from omegaconf import OmegaConf
    from safetensors.torch import save_file

    checkpoints, loras, clip = out / "Stable-diffusion", out / "Lora", out / "clip"
    for folder in (checkpoints, loras):
        folder.mkdir(parents=True, exist_ok=True)
    write_clip(clip)
    for name, channels in (("tiny", 32), ("wide", 64)):
        config = shrink(OmegaConf.load("configs/v1-inference.yaml"), clip, channels)
        OmegaConf.save(config, checkpoints / f"{name}.yaml")
        model = instantiate_from_config(config.model)
        state = randomise(model, seed=channels)
        save_file(state, checkpoints / f"{name}.safetensors")
        if name == "tiny":
            other = {"state_dict": randomise(model, seed=7)}
            # The older format: WebUI 1.10.1 takes what torch 2.7 adds to its zip files for something malicious.
            torch.save(other, checkpoints / "tiny.ckpt", _use_new_zipfile_serialization=False)
            save_file(lora(state, seed=3, strength=1.0), loras / "strong.safetensors")
            save_file(full(state, seed=4), loras / "full.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
