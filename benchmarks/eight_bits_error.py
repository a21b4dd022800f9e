"""How far 8-bit integers move a result, next to other libraries: `python -m benchmarks.eight_bits_error`, on a CPU.

The same linear layers of transformers are computed in 8 bits by this project (the references of its kernels, its own
selection of layers and rotations), by torchao (`Int8DynamicActivationInt8WeightConfig`) and by SDNQ (int8 products,
without and with its Hadamard rotation). All else is in float32, so that nothing but the quantisation differs. Errors
are relative to float32 on the same weights, which are random. *float16* has the same layers in half precision.

Cases: single transformer blocks of SDXL in their real size, of which the error is that of what the block adds to its
input, and a UNet with SDXL's structure and a fifth of its channels. *channels*: four channels of each norm are 50 times
as large, and the weights that read them 50 times as small, so that float32 gives the same. *token*: the first token of
the prompt is 100 times as large.

A library that is not installed is named in one line. Their wheels need no dependencies here: `pip install --no-deps`.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import records
from sfast_ext.kernels.eight_bits import linear8, quantise_rows
from sfast_ext.passes.eight_bits_selection import GROUPS, Errors, Selection, errors_of, hadamard, relative
from sfast_ext.tools.lib import models

OURS, HALF = "this extension", "float16"
PEERS = {"torchao": ("torchao int8 dynamic",), "sdnq": ("SDNQ int8", "SDNQ int8, Hadamard")}
PLANTED = ("plain", "channels", "token")
CHANNELS, LARGER, TOKEN = 4, 50.0, 100.0
TOKENS = 1024
"""Of a block's input."""
BLOCKS = {"block of 640": (640, 10), "block of 1280": (1280, 20)}
"""Channels and heads, as in SDXL."""
UNET = {
    **models.CONFIGURATIONS["sdxl"],
    "block_out_channels": (64, 128, 256),
    "attention_head_dim": (1, 2, 4),
    "cross_attention_dim": 256,
    "transformer_layers_per_block": (1, 2, 10),
    "projection_class_embeddings_input_dim": 64 + 6 * 256,
}
SIZE = 512
"""Of the UNet's image."""


def layers(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers that are computed in 8 bits: those of transformer blocks but the keys and values of the
    prompt."""
    for name, layer in module.named_modules():
        inner = ".attn" in f".{name}" or ".ff." in f".{name}"
        if isinstance(layer, nn.Linear) and inner and "attn2.to_k" not in name and "attn2.to_v" not in name:
            yield name, layer


def after_a_norm(name: str) -> bool:
    """Whether the kernel of a norm writes a layer's input."""
    return name.endswith((".to_q", ".to_k", ".to_v", "net.0.proj"))


class InEightBits(nn.Module):
    """A linear layer by this project's references."""

    def __init__(self, layer: nn.Linear, group: int) -> None:
        super().__init__()
        self.bias, self.group = layer.bias, group
        self.rows, self.scales = quantise_rows.reference(layer.weight, group)

    def forward(self, x: Tensor) -> Tensor:
        return linear8.reference(
            *quantise_rows.reference(x, self.group), self.rows, self.scales, self.bias, dtype=x.dtype
        )


class InHalfPrecision(nn.Module):
    """A linear layer whose operands and result are rounded to float16."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight.half().float(), layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.half().float(), self.weight, self.bias).half().float()


def half(module: nn.Module) -> None:
    """Compute the layers of a module in half precision."""
    for name, layer in list(layers(module)):
        replaced(module, name, InHalfPrecision(layer))


def replaced(module: nn.Module, name: str, layer: nn.Module) -> None:
    """Put a layer in another's place."""
    place, _, last = name.rpartition(".")
    setattr(module.get_submodule(place), last, layer)


def ours(module: nn.Module, run: Callable[[nn.Module], Tensor]) -> str:
    """Compute the layers of a module in 8 bits as a plan would. Returns what was selected."""
    errors: dict[str, Errors] = {}
    handles = []
    for name, layer in layers(module):
        group = next((g for g in GROUPS if layer.in_features % g == 0), 0)

        def seen(at: nn.Linear, given: Any, name: str = name, group: int = group) -> None:
            turn = hadamard(group, given[0].device) if group else None
            plain, rotated = relative(errors_of(given[0], at.weight, turn).tolist())
            errors[name] = Errors(plain, rotated, group)

        handles.append(layer.register_forward_pre_hook(seen))
    run(module)
    for handle in handles:
        handle.remove()
    selection = Selection()
    selection.learn(errors)
    rotations = 0
    for name, layer in list(layers(module)):
        if name not in selection.kept:
            group = selection.group(name, not after_a_norm(name))
            rotations += bool(group)
            replaced(module, name, InEightBits(layer, group))
    return f"{len(errors) - len(selection.kept)} of {len(errors)} layers, {rotations} of them rotated"


def torchao(module: nn.Module) -> None:
    """Quantise the layers of a module by torchao."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    names = {name for name, _ in layers(module)}
    quantize_(module, Int8DynamicActivationInt8WeightConfig(), filter_fn=lambda layer, name: name in names)


def sdnq(module: nn.Module, rotated: bool) -> None:
    """Quantise the layers of a module by SDNQ."""
    from sdnq.quantizer import SDNQConfig, sdnq_quantize_layer

    for name, layer in list(layers(module)):
        config = SDNQConfig(weights_dtype="int8", use_quantized_matmul=True, use_hadamard=rotated)
        replaced(module, name, sdnq_quantize_layer(layer, config, torch_dtype=torch.float32, param_name=name)[0])


def planted(module: nn.Module, prompt: Tensor, what: str) -> Tensor:
    """Plant outliers in a module. Returns the prompt, with its own."""
    if what == "token":
        prompt = prompt.clone()
        prompt[:, 0] *= TOKEN
    if what == "channels":
        generator = torch.Generator().manual_seed(0)
        for block in module.modules():
            if type(block).__name__ == "BasicTransformerBlock":
                for norm, readers in _norms(block):
                    at = torch.randperm(norm.weight.numel(), generator=generator)[:CHANNELS]
                    norm.weight.data[at] *= LARGER
                    norm.bias.data[at] *= LARGER
                    for reader in readers:
                        reader.weight.data[:, at] /= LARGER
    return prompt


def _norms(block: Any) -> list[tuple[nn.LayerNorm, list[nn.Linear]]]:
    first, second = block.attn1, block.attn2
    return [
        (block.norm1, [first.to_q, first.to_k, first.to_v]),
        (block.norm2, [second.to_q]),
        (block.norm3, [block.ff.net[0].proj]),
    ]


def block_case(channels: int, heads: int, what: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A transformer block of SDXL, and what runs it: the result is what it adds to its input."""
    from diffusers.models.attention import BasicTransformerBlock

    block = models.randomise(BasicTransformerBlock(channels, heads, channels // heads, cross_attention_dim=2048), 0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, TOKENS, channels, generator=generator)
    prompt = planted(block, torch.randn(1, models.TOKENS, 2048, generator=generator), what)
    return block.eval(), lambda module: module(x, encoder_hidden_states=prompt) - x


def unet_case(what: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A UNet of SDXL's structure, and what runs it."""
    from diffusers import UNet2DConditionModel

    unet = models.randomise(UNet2DConditionModel(**UNET), 0).eval()
    args, kwargs = models.unet_inputs(unet, SIZE, SIZE)
    kwargs["encoder_hidden_states"] = planted(unet, kwargs["encoder_hidden_states"], what)
    return unet, lambda module: module(*args, **kwargs)[0]


def installed(package: str) -> bool:
    """Whether a library is there; says so if not."""
    if importlib.util.find_spec(package) is not None:
        return True
    print(f"{package} is not installed: it is left out", file=sys.stderr)
    return False


def measured(case: str, what: str, peers: Sequence[str]) -> dict[str, Any]:
    """The errors of all ways, and what this project selected."""
    base, run = unet_case(what) if case == "UNet" else block_case(*BLOCKS[case], what)
    exact = run(base)
    found: dict[str, Any] = {"case": case, "planted": what}

    def error(make: Callable[[nn.Module], Any]) -> float:
        module = copy.deepcopy(base)
        found["selected"] = make(module) or found.get("selected")
        away = torch.linalg.vector_norm(run(module).float() - exact) / torch.linalg.vector_norm(exact)
        return float(away) if math.isfinite(away) else math.inf

    found[OURS] = error(lambda module: ours(module, run))
    found[HALF] = error(half)
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "torchao int8 dynamic": torchao,
        "SDNQ int8": lambda module: sdnq(module, False),
        "SDNQ int8, Hadamard": lambda module: sdnq(module, True),
    }
    found.update({name: error(ways[name]) for peer in peers for name in PEERS[peer]})
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    ways = HALF, OURS, *(name for each in PEERS.values() for name in each)
    names = [name for name in ways if any(name in row for row in rows)]
    lines = ["| Case | Planted | " + " | ".join(names) + " | selected |", "|---" * (len(names) + 3) + "|"]
    for row in rows:
        errors = [f"{row[name]:.2e}" if name in row else "" for name in names]
        lines.append("| " + " | ".join([row["case"], row["planted"], *errors, row["selected"]]) + " |")
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.eight_bits_error", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--case", action="append", choices=(*BLOCKS, "UNet"), help="by default all")
    parser.add_argument("--planted", action="append", choices=PLANTED, help="by default all")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(given)
    peers = [peer for peer in PEERS if installed(peer)]
    rows = []
    with torch.no_grad():
        for case in options.case or (*BLOCKS, "UNet"):
            for what in options.planted or PLANTED:
                rows.append(measured(case, what, peers))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    if options.json is not None:
        records.write(options.json, {"torch": torch.__version__, "rows": rows})
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
