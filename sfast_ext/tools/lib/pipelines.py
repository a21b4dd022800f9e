"""Whole Stable Diffusion pipelines: of random weights, or the user's own, and without a network if that can be."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from sfast_ext.tools.lib import Unavailable, models, names, weight_files

_VAE: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}
_FULL_VAE = {**_VAE, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "sample_size": 512}
_TINY_VAE = {
    **_VAE,
    "block_out_channels": (16, 16, 32, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 64,
}
_ENCODERS = {
    # width, layers and heads of each
    "sdxl": ((768, 12, 12), (1280, 32, 20)),
    "tiny-sdxl": ((32, 2, 4), (32, 2, 4)),
}
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGITS = tuple(f"the digit {word}" for word in _WORDS)
"""The prompts of a model that writes digits, see `benchmarks.digits`."""
_SCHEDULER = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def _byte_letters() -> list[str]:
    # the letters that CLIP's byte pair encoding writes the 256 bytes with
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    return [chr(b) for b in plain] + [chr(256 + i) for i in range(256 - len(plain))]


def byte_tokenizer() -> Any:
    """A CLIP tokenizer that knows single bytes only, which needs no download."""
    from transformers import CLIPTokenizer

    letters = _byte_letters()
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    with tempfile.TemporaryDirectory() as folder:
        vocabulary, merges = Path(folder, "vocab.json"), Path(folder, "merges.txt")
        vocabulary.write_text(json.dumps({token: i for i, token in enumerate(tokens)}), encoding="utf-8")
        merges.write_text("#version: 0.2\n", encoding="utf-8")
        Path(folder, "tokenizer_config.json").write_text(
            json.dumps({"model_max_length": models.TOKENS, "tokenizer_class": "CLIPTokenizer"}), encoding="utf-8"
        )
        return CLIPTokenizer.from_pretrained(folder)


def random_pipeline(name: str = "tiny-sd15", seed: int = 0, *, dtype: torch.dtype, device: torch.device) -> Any:
    """A pipeline of random weights: UNet, text encoders and VAE, tiny or of full size.

    Args:
        name: sd15, sd21 or sdxl of `models.NAMES`, or their tiny shapes.
    """
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    tiny = name.startswith("tiny-")
    width = models.unet_config(name)["cross_attention_dim"]
    sizes = _ENCODERS.get(name) or ((width, 2 if tiny else 12, 4 if tiny else width // 64),)
    tokenizer = byte_tokenizer()
    parts: dict[str, Any] = {"text_encoder": CLIPTextModel(_text_config(tokenizer, *sizes[0]))}
    if len(sizes) > 1:
        parts["text_encoder_2"] = CLIPTextModelWithProjection(_text_config(tokenizer, *sizes[1]))
    parts["vae"] = AutoencoderKL(**(_TINY_VAE if tiny else _FULL_VAE), force_upcast=False)
    for i, part in enumerate(parts.values()):
        nn.Module.to(models.randomise(part, seed + 1 + i), device, dtype).eval().requires_grad_(False)
    parts["unet"] = models.random_unet(name, seed, dtype=dtype, device=device)
    parts["scheduler"] = DDIMScheduler(**_SCHEDULER, clip_sample=False, set_alpha_to_one=False)
    parts["tokenizer"] = tokenizer
    nothing = {"feature_extractor": None, "image_encoder": None}
    if len(sizes) > 1:
        alike = {"force_zeros_for_empty_prompt": False, "add_watermarker": False}
        return StableDiffusionXLPipeline(**parts, tokenizer_2=tokenizer, **alike, **nothing)
    return StableDiffusionPipeline(**parts, safety_checker=None, requires_safety_checker=False, **nothing)


def _text_config(tokenizer: Any, width: int, layers: int, heads: int) -> Any:
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        projection_dim=width,
        max_position_embeddings=models.TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )


def convert(pipe: Any, dtype: torch.dtype) -> None:
    """Convert all models of a pipeline in place."""
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            nn.Module.to(part, dtype)


TRAINED = Path(__file__).with_name("digits.safetensors")
"""Weights of a tiny SD 1.5 that writes digits: UNet, VAE and text encoder in float16."""


def trained_pipeline(*, dtype: torch.dtype, device: torch.device) -> Any:
    """The tiny pipeline that `benchmarks.digits` has taught to write digits; its prompts are DIGITS."""
    from safetensors.torch import load_file

    pipe = random_pipeline("tiny-sd15", dtype=dtype, device=device)
    weights = load_file(TRAINED)
    with torch.no_grad():
        for name, value in _named(pipe):
            value.copy_(weights[name])
    return pipe


def save_trained(pipe: Any, file: Path) -> None:
    """Write what `trained_pipeline` reads."""
    from safetensors.torch import save_file

    save_file({name: value.detach().half().contiguous() for name, value in _named(pipe)}, file)


def _named(pipe: Any) -> Iterator[tuple[str, nn.Parameter]]:
    for part in ("unet", "vae", "text_encoder"):
        for name, value in getattr(pipe, part).named_parameters():
            # transformers before 5 has CLIP's encoder one level further down
            yield f"{part}.{name.removeprefix('text_model.')}", value


class Scale(NamedTuple):
    """How images are made."""

    dtype: torch.dtype
    steps: int
    size: tuple[int, int]


def scale(device: torch.device, steps: int | None, size: tuple[int, int] | None) -> Scale:
    """What was asked for; else, on a CPU, what takes it some seconds."""
    if device.type == "cpu":
        return Scale(torch.float32, steps or 6, size or (128, 128))
    return Scale(torch.float16, steps or 20, size or (512, 512))


class Chosen(NamedTuple):
    """A pipeline, in words what it is, and the prompts that it understands; None for any."""

    pipe: Any
    name: str
    prompts: tuple[str, ...] | None


def chosen(model: str | None, *, dtype: torch.dtype, device: torch.device) -> Chosen:
    """The pipeline of one of `names.TEXT_TO_IMAGE` or of a path, see `load_pipeline`; of None sd15's, on a CPU the
    tiny one that writes digits.

    Raises:
        Unavailable: the model cannot be loaded.
    """
    name = model or (names.DIGITS if device.type == "cpu" else "sd15")
    if name == names.DIGITS:
        return Chosen(trained_pipeline(dtype=dtype, device=device), "a tiny model that writes digits", DIGITS)
    if name in names.TEXT_TO_IMAGE:
        return Chosen(random_pipeline(name, dtype=dtype, device=device), f"{name} with random weights", None)
    return Chosen(load_pipeline(name, dtype=dtype, device=device), name, None)


def load_pipeline(path: str, *, dtype: torch.dtype, device: torch.device) -> Any:
    """The pipeline of a folder of diffusers or of a single-file checkpoint.

    A single file brings no tokenizer: diffusers downloads it, with the configuration, unless it has them already.

    Raises:
        Unavailable: it cannot be loaded.
    """
    from diffusers import DiffusionPipeline, StableDiffusionPipeline, StableDiffusionXLPipeline

    with _loading(path, pipeline=True):
        if Path(path).is_dir():
            return DiffusionPipeline.from_pretrained(path, torch_dtype=dtype, safety_checker=None).to(device)
        name = checkpoint_name(path)
        if name not in names.TEXT_TO_IMAGE:
            raise Unavailable(f"{path} is a checkpoint of {name}, which makes no image of a text alone: name another")
        kind: Any = StableDiffusionXLPipeline if name == "sdxl" else StableDiffusionPipeline
        return kind.from_single_file(path, torch_dtype=dtype).to(device)


def load_unet(path: str, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The UNet of a folder of diffusers (a pipeline's or its unet's) or of a single file; no network is used.

    Raises:
        Unavailable: it cannot be loaded.
    """
    from diffusers import UNet2DConditionModel

    where = Path(path)
    with _loading(path, pipeline=False):
        if where.is_dir():
            subfolder = "unet" if (where / "unet").is_dir() else None
            unet = UNet2DConditionModel.from_pretrained(path, subfolder=subfolder, torch_dtype=dtype)
        else:
            with tempfile.TemporaryDirectory() as folder:
                config = {"_class_name": "UNet2DConditionModel", **models.unet_config(checkpoint_name(path))}
                Path(folder, "unet").mkdir()
                Path(folder, "unet", "config.json").write_text(json.dumps(config), encoding="utf-8")
                unet = UNet2DConditionModel.from_single_file(path, config=folder, subfolder="unet", torch_dtype=dtype)
        return unet.to(device).eval().requires_grad_(False)


@contextlib.contextmanager
def _loading(path: str, *, pipeline: bool) -> Iterator[None]:
    """Whatever the libraries raise of a file is about that file."""
    weight_files.check(Path(path), pipeline=pipeline)
    try:
        yield
    except (Unavailable, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as exc:
        said = f"{path} cannot be loaded ({type(exc).__name__}: {weight_files.first_line(exc)})"
        raise Unavailable(f"{said}: name another file, or download it again") from exc


def checkpoint_name(path: str) -> str:
    """Which of `models.NAMES` a .safetensors checkpoint is, by the shapes of its tensors.

    Raises:
        Unavailable: it is none of them.
    """
    from safetensors import safe_open

    unet = "model.diffusion_model."
    with safe_open(path, framework="pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys() if key.startswith(unet)}  # noqa: SIM118
    first = shapes.get(f"{unet}input_blocks.0.0.weight")
    context = next((shape[1] for key, shape in shapes.items() if key.endswith("attn2.to_k.weight")), None)
    for name, config in models.CONFIGURATIONS.items():
        expected = [config["block_out_channels"][0], config["in_channels"]]
        if context == config["cross_attention_dim"] and first is not None and list(first[:2]) == expected:
            return name
    raise Unavailable(
        f"{path} is no checkpoint of Stable Diffusion 1.5, 2, XL or its refiner, such as a LoRA, a VAE or another"
        " model: name a checkpoint"
    )
