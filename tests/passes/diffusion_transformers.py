"""Blocks of diffusion transformers as diffusers has them, tiny and with random weights, as graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sfast_ext.kernels.backend.registry import Kernel
from sfast_ext.kernels.pointwise import gated_norm, gated_residual, modulated_norm, norm_rotary, swiglu

from .support import Traced, randn

KERNELS = (gated_norm.launch, gated_residual.launch, modulated_norm.launch, norm_rotary.launch, swiglu.launch)
HALF = torch.bfloat16


def available(patch: pytest.MonkeyPatch) -> None:
    """Until the patch is undone, plans may be made of the kernels; what runs is their references."""
    supported = Kernel.supported

    def there(kernel: Kernel[..., Any], device: torch.device, *, triton: bool) -> bool:
        return kernel in KERNELS or supported(kernel, device, triton=triton)

    patch.setattr(Kernel, "supported", there)


class Block(nn.Module):
    """A block that is called with tensors alone."""

    def __init__(self, block: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.block, self.call = block, call
        for parameter in self.parameters():  # norms' weights, too
            nn.init.normal_(parameter, std=0.3 if parameter.dim() < 2 else parameter.shape[1] ** -0.5)

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self.block, *inputs)


def pairs(*shape: int) -> Tensor:
    """Complex numbers of magnitude 1."""
    angle = randn(*shape)
    return torch.polar(torch.ones_like(angle), angle)


def z_image(modulation: bool = True, tokens: int = 12, width: int = 64) -> tuple[Block, list[Tensor]]:
    module = pytest.importorskip("diffusers.models.transformers.transformer_z_image")
    block = module.ZImageTransformerBlock(0, width, 2, 2, 1e-5, True, modulation=modulation)
    x, mask, table = randn(2, tokens, width), torch.ones(2, tokens, dtype=torch.bool), pairs(2, tokens, width // 4)
    if not modulation:
        return Block(block, lambda b, *given: b(*given)), [x, mask, table]
    return Block(block, lambda b, *given: b(*given)), [x, mask, table, randn(2, min(width, 256))]


def lumina(modulation: bool = True, tokens: int = 12) -> tuple[Block, list[Tensor]]:
    module = pytest.importorskip("diffusers.models.transformers.transformer_lumina2")
    block = module.Lumina2TransformerBlock(64, 2, 1, 16, None, 1e-5, modulation=modulation)
    x, mask, table = randn(2, tokens, 64), torch.ones(2, tokens, dtype=torch.bool), pairs(2, tokens, 16)
    given = [x, mask, table, randn(2, 64)] if modulation else [x, mask, table]
    return Block(block, lambda b, *tensors: b(*tensors)), given


def cosmos(tokens: int = 12) -> tuple[Block, list[Tensor]]:
    module = pytest.importorskip("diffusers.models.transformers.transformer_cosmos")
    block = module.CosmosTransformerBlock(2, 32, 48, adaln_lora_dim=16, qk_norm="rms_norm", out_bias=False)
    given = [randn(2, tokens, 64), randn(2, 5, 48), randn(2, 64), randn(2, 192), randn(tokens, 32), randn(tokens, 32)]
    return Block(block, lambda b, x, text, time, emb, cos, sin: b(x, text, time, emb, (cos, sin))), given


def flux(single: bool = False) -> tuple[Block, list[Tensor]]:
    module = pytest.importorskip("diffusers.models.transformers.transformer_flux")
    block = (module.FluxSingleTransformerBlock if single else module.FluxTransformerBlock)(64, 2, 32)
    given = [randn(2, 12, 64), randn(2, 5, 64), randn(2, 64), randn(17, 32), randn(17, 32)]
    return Block(block, lambda b, x, text, emb, cos, sin: b(x, text, emb, (cos, sin))), given


def chroma(single: bool = False) -> tuple[Block, list[Tensor]]:
    module = pytest.importorskip("diffusers.models.transformers.transformer_chroma")
    block = (module.ChromaSingleTransformerBlock if single else module.ChromaTransformerBlock)(64, 2, 32)
    x, text, rotation = randn(2, 12, 64), randn(2, 5, 64), [randn(17, 32), randn(17, 32)]
    if single:
        given = [randn(2, 17, 64), randn(2, 3, 64), *rotation]
        return Block(block, lambda b, x, emb, cos, sin: b(x, emb, (cos, sin))), given
    given = [x, text, randn(2, 12, 64), *rotation]
    return Block(block, lambda b, x, text, emb, cos, sin: b(x, text, emb, (cos, sin))), given


BLOCKS: dict[str, Callable[[], tuple[Block, list[Tensor]]]] = {
    "Z-Image": z_image,
    "Z-Image, of the prompt": lambda: z_image(False),
    "Lumina 2": lumina,
    "Lumina 2, of the prompt": lambda: lumina(False),
    "Cosmos": cosmos,
    "Flux": flux,
    "Flux, single": lambda: flux(True),
    "Chroma": chroma,
    "Chroma, single": lambda: chroma(True),
}


def half(inputs: list[Tensor], dtype: torch.dtype = HALF) -> list[Tensor]:
    """Activations in half precision; tables of angles stay in float32."""
    tables = [t.dim() == 2 and t.shape[0] > 2 for t in inputs]
    return [t.to(dtype) if t.dtype == torch.float32 and not table else t for t, table in zip(inputs, tables)]


def traced(which: str, dtype: torch.dtype = HALF) -> Traced:
    """A block in half precision as a graph."""
    block, inputs = BLOCKS[which]()
    return Traced(block.to(dtype), *half(inputs, dtype))
