"""Makes tiny checkpoints of random weights of the transformers that SD.Next loads: Lumina 2 and Z-Image.

    python sdnext_transformers.py MODELS_DIRECTORY

Run by the host's own interpreter.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import sdnext_models
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WIDTH = 32
COMMIT = 40 * "0"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def tokenizer() -> Any:
    """One whose tokens are characters."""
    letters = ["<unk>", "<pad>", "<bos>", "<eos>", *map(chr, range(32, 127))]
    made = Tokenizer(WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    words = {name: f"<{name}>" for name in ("unk", "pad", "bos", "eos")}
    special = {f"{name}_token": word for name, word in words.items()}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, padding_side="right", **special)
    fast.chat_template = TEMPLATE
    return fast


def text_config(kind: Any) -> Any:
    """The configuration of a language model in miniature."""
    return kind(
        vocab_size=128, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, pad_token_id=1, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip


def strengthened(model: Any) -> Any:
    """With weights of which none is zero, so that an image depends on all."""
    with torch.no_grad():
        for weight in model.parameters():
            spread = 0.8 / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 0.1
            weight.copy_(torch.randn_like(weight) * spread + (weight.dim() == 1))
    return model


def lumina_2(seed: int) -> Any:
    """Lumina 2 in miniature."""
    torch.manual_seed(seed)
    transformer = Lumina2Transformer2DModel(
        sample_size=16, in_channels=4, hidden_size=48, num_layers=2, num_refiner_layers=1, num_attention_heads=4,
        num_kv_heads=2, multiple_of=16, axes_dim_rope=(4, 4, 4), axes_lens=(300, 64, 64), cap_feat_dim=WIDTH,
    )  # fmt: skip
    return Lumina2Pipeline(
        transformer=strengthened(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=sdnext_models.vae(),
        text_encoder=Gemma2Model(text_config(Gemma2Config)),
        tokenizer=tokenizer(),
    )


def z_image(seed: int) -> Any:
    """Z-Image in miniature."""
    torch.manual_seed(seed)
    transformer = ZImageTransformer2DModel(
        in_channels=4, dim=48, n_layers=2, n_refiner_layers=1, n_heads=4, n_kv_heads=4, cap_feat_dim=WIDTH,
        axes_dims=[4, 4, 4], axes_lens=[1024, 64, 64],
    )  # fmt: skip
    return ZImagePipeline(
        transformer=strengthened(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=sdnext_models.vae(),
        text_encoder=Qwen3ForCausalLM(text_config(Qwen3Config)),
        tokenizer=tokenizer(),
    )


PROJECTIONS = ("to_q", "to_v", "to_out.0", "linear_1", "w1", "w2")


def lora(transformer: Any, seed: int) -> dict[str, torch.Tensor]:
    """A LoRA on projections of attentions and feed-forward parts, in the names of diffusers."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, module in transformer.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("layers.") and name.endswith(PROJECTIONS):
            rows, columns = module.weight.shape
            down, up = (torch.randn(*size, generator=generator) * 0.3 for size in ((4, columns), (rows, 4)))
            found[f"transformer.{name}.lora_A.weight"], found[f"transformer.{name}.lora_B.weight"] = down, up
    return found


def main(folder: Path) -> None:
    """Write both, and two LoRAs for each, under the host's models folder."""
    (folder / "Lora").mkdir(parents=True, exist_ok=True)
    for name, made in (("lumina", lumina_2(51)), ("zimage", z_image(52))):
        for i in (1, 2):
            save_file(lora(made.transformer, 60 + i), str(folder / "Lora" / f"{name}-{i}.safetensors"))
    lumina_2(51).save_pretrained(folder / "Diffusers" / "tiny-lumina-image-2")
    made = z_image(52)
    made.save_pretrained(folder / "Diffusers" / "tiny-z-image")
    # SD.Next takes the parts from a folder, and puts them into the pipeline of the large model
    cached = folder / "Diffusers" / "models--Tongyi-MAI--Z-Image"
    made.save_pretrained(cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
