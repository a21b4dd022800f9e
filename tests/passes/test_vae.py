"""All passes over ldm's VAE with the attentions that AUTOMATIC1111 puts into it, and over diffusers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from benchmarks import vaes
from sfast_ext.call_signature import flatten_call
from sfast_ext.capture.capture import capture
from sfast_ext.kernels.attention import attention as attention_kernel
from sfast_ext.kernels.backend.graph_memory import peak_bytes, step_bytes
from sfast_ext.kernels.conv import upsample_conv2d as upsample_kernel
from sfast_ext.passes import PassContext, run_passes
from sfast_ext.plans.register_machine import Interpreter
from sfast_ext.tools.lib import models
from sfast_ext.weights.arena import WeightArena

from .overwriting import largest_value, overwriting
from .support import relative

CPU = torch.device("cpu")
DIFFUSERS = tuple(map(int, diffusers.__version__.split(".")[:2]))
SHAPE: dict[str, Any] = {
    "ch": 32, "out_ch": 3, "ch_mult": (1, 2, 2), "num_res_blocks": 1, "attn_resolutions": [], "in_channels": 3,
    "resolution": 32, "z_channels": 4, "double_z": True,
}  # fmt: skip


def in_slices(count: int) -> Callable[[Any, Tensor], Tensor]:
    """As its Doggettx's has it, which counts slices by the free memory."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        b, c, height, width = q.shape
        q = q.reshape(b, c, height * width).permute(0, 2, 1)
        k = k.reshape(b, c, height * width)
        out = torch.zeros_like(k, device=q.device)
        size = q.shape[1] // count
        for i in range(0, q.shape[1], size):
            weights = torch.bmm(q[:, i : i + size], k) * (int(c) ** (-0.5))
            weights = F.softmax(weights, dim=2, dtype=q.dtype)
            values = v.reshape(b, c, height * width)
            out[:, :, i : i + size] = torch.bmm(values, weights.permute(0, 2, 1))
        out = self.proj_out(out.reshape(b, c, height, width))
        out += x
        return out

    return forward


def by_sdpa(self: Any, x: Tensor) -> Tensor:
    """As its SDP has it, over three dimensions."""
    h = self.norm(x)
    q, k, v = self.q(h), self.k(h), self.v(h)
    b, c, height, width = q.shape
    q, k, v = (t.permute(0, 2, 3, 1).reshape(b, height * width, c).contiguous() for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=False)
    return x + self.proj_out(out.reshape(b, height, width, c).permute(0, 3, 1, 2))


ATTENTIONS: dict[str, Callable[[Any, Tensor], Tensor] | None] = {
    "ldm's own": None,
    "Doggettx": in_slices(1),
    "Doggettx short of memory": in_slices(4),
    "SDP": by_sdpa,
}


class Rewritten:
    def __init__(self, module: nn.Module, x: Tensor, most: int | None = None) -> None:
        module = models.randomise(module, 0).eval().requires_grad_(False)
        arena, call = WeightArena(module), flatten_call((x,), {}, CPU)
        with torch.no_grad():
            self.expected = module(x)
            self.gm = capture(module.forward, call, [x], arena, frozenset({"last_z_shape"})).graph_module
        self.captured, step = peak_bytes(self.gm.graph), step_bytes(self.gm.graph)
        context = PassContext(arena, CPU, triton=True, most_bytes=step if most is None else most)
        self.counts, self.modules = run_passes(self.gm, context), list(module.modules())
        self.gm.graph.lint()
        with torch.no_grad():
            self.error = relative(Interpreter(self.gm)(x)[0], self.expected)

    def norms(self) -> int:
        return sum(isinstance(m, nn.GroupNorm) for m in self.modules)

    def attentions(self) -> list[fx.Node]:
        return [n for n in self.gm.graph.nodes if n.target is attention_kernel.launch]

    def operations(self) -> set[str]:
        found = (n.target for n in self.gm.graph.nodes if n.op == "call_function")
        return {target._schema.name.split("::")[1] for target in found if isinstance(target, torch._ops.OpOverload)}


@pytest.mark.parametrize("part", ["Decoder", "Encoder"])
@pytest.mark.parametrize("how", ATTENTIONS)
def test_ldm(how: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = pytest.importorskip("ldm.modules.diffusionmodules.model", reason="needs stable-diffusion-sdkit")
    attend = ATTENTIONS[how]
    if attend is not None:
        monkeypatch.setattr(code.AttnBlock, "forward", attend)
    x = torch.randn(1, 4, 8, 8) if part == "Decoder" else torch.randn(1, 3, 32, 32)
    ours = Rewritten(getattr(code, part)(**SHAPE), x)
    assert ours.error < 1e-5
    # each norm takes its SiLU with it, though ldm writes it as x * sigmoid(x)
    assert ours.counts["group_norm"] == ours.norms() and ours.counts["silu"] == ours.norms() - 1
    assert {"sigmoid", "mul", "silu", "softmax", "bmm", "group_norm"}.isdisjoint(ours.operations())
    (attention,) = ours.attentions()
    # one head of all channels, which no kernel would store the scores of
    assert attention.meta["val"].shape == (1, 1, 64, 64)


@pytest.mark.parametrize("part", vaes.PARTS)
def test_diffusers(part: str) -> None:
    module = getattr(vaes.random_vae("tiny-sd"), part)
    ours = Rewritten(module, vaes.part_input(part, 64, 48))
    assert ours.error < 1e-5
    assert ours.counts["group_norm"] == ours.norms() and len(ours.attentions()) == 1
    assert {"silu", "softmax", "group_norm"}.isdisjoint(ours.operations())


def of_real_width(most: int | None = None) -> Rewritten:
    torch.manual_seed(0)
    decoder = vaes.random_vae("sd", dtype=torch.bfloat16).decoder
    return Rewritten(decoder, vaes.part_input("decoder", 64, 64, dtype=torch.bfloat16), most)


@pytest.mark.long
@pytest.mark.skipif(DIFFUSERS < (0, 32), reason="older diffusers upsample bfloat16 in float32")
def test_no_upsampling_needs_more_memory_than_the_original_does_at_its_peak() -> None:
    ours, without_limit = of_real_width(), of_real_width(most=2**62)
    kernels = [sum(n.target is upsample_kernel.launch for n in each.gm.graph.nodes) for each in (ours, without_limit)]
    # the last of the three is of the whole image, where the products of nine taps are the largest values of all
    assert kernels == [2, 3]
    assert peak_bytes(ours.gm.graph) <= ours.captured < peak_bytes(without_limit.gm.graph)
    assert ours.error < 0.05 and without_limit.error < 0.05


@pytest.mark.long(but=[1])
@pytest.mark.skipif(DIFFUSERS < (0, 32), reason="older diffusers upsample bfloat16 in float32")
@pytest.mark.parametrize("program", ["diffusers", "ldm"])
def test_no_more_is_needed_than_by_the_largest_convolution(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = overwriting(monkeypatch)
    if program == "diffusers":
        ours, limit = of_real_width(), 0.05
    else:
        code = pytest.importorskip("ldm.modules.diffusionmodules.model", reason="needs stable-diffusion-sdkit")
        ours, limit = Rewritten(code.Decoder(**SHAPE), torch.randn(1, 4, 32, 32)), 1e-5
    largest = largest_value(ours.gm.graph)
    # the image before and behind the convolution after the last upsampling
    assert peak_bytes(ours.gm.graph) <= 2.1 * largest < 3 * largest <= ours.captured
    # written over: the input of the last level's first block, and more
    assert ours.error < limit and max(taken) == largest and len(taken) > 3
    # once each, wherever it is decided
    assert ours.counts["memory_order"] == 1 and ours.counts["conv_group_norm"] == 0
