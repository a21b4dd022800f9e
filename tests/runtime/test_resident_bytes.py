"""What a UNet's weights take on a small card in 8 bits: convolutions and the keys and values of the prompt as well."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pretended_card import Card
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext import Accelerator, Config, accelerate, reasons
from sfast_ext.kernels.eight_bits import quantise_weights
from sfast_ext.runtime import residency, verify

from .eight_bits import HALF
from .test_resident import CARD, OFF, card, kernels  # noqa: F401

C, PROMPT = 64, 128
ASKED = 0.55
"""Of half precision."""


class Residual(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, out)
        self.conv1, self.conv2 = nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.conv2(F.silu(self.norm2(y))) + self.shortcut(x)


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C)
        self.to_q, self.to_out = nn.Linear(C, C, bias=False), nn.Linear(C, C)
        self.to_k, self.to_v = nn.Linear(PROMPT, C, bias=False), nn.Linear(PROMPT, C, bias=False)

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        q = self.to_q(self.norm(x))
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in (q, self.to_k(prompt), self.to_v(prompt)))
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)) + x


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, C, 3, padding=1), nn.Conv2d(C, 4, 3, padding=1)
        self.one, self.two, self.three = Residual(C, C), Residual(C, C), Residual(2 * C, C)
        self.down = nn.Conv2d(C, C, 3, padding=1, stride=2)
        self.cross = nn.ModuleList([Cross(), Cross()])

    def forward(self, x: Tensor, prompt: Tensor) -> Tensor:
        x = skip = self.one(self.first(x))
        y = self.down(x)
        tokens = y.flatten(2).mT
        for each in self.cross:
            tokens = each(tokens, prompt)
        y = self.two(tokens.mT.unflatten(2, y.shape[2:]))
        return self.last(self.three(torch.cat([F.interpolate(y, scale_factor=2.0), skip], 1)))


IN_8_BITS = [f"{name}.conv{i}" for name in ("one", "two", "three") for i in (1, 2)]
IN_8_BITS += [f"cross.{i}.{name}" for i in range(2) for name in ("to_q", "to_k", "to_v", "to_out")]


class On:
    """A UNet under an accelerator, and its twin."""

    def __init__(self, outlier: bool = False) -> None:
        torch.manual_seed(0)
        self.twin = UNet().to(HALF).eval()
        self.ours = copy.deepcopy(self.twin).to("cuda")
        self.acc: Accelerator = accelerate(self.ours, CARD)
        self.seed, self.outlier = 0, outlier

    def error(self, size: int = 12) -> float:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        x, prompt = (torch.randn(s, generator=generator) for s in ((2, 4, size, size), (2, 7, PROMPT)))
        if self.outlier:
            # as of CLIP: one channel, most of all of the first token
            prompt[..., 5], prompt[:, 0, 5] = 12.0, 60.0
        x, prompt = x.to(HALF), prompt.to(HALF)
        return verify.relative_error([self.ours(x.cuda(), prompt.cuda()).cpu()], [self.twin(x, prompt)])

    def both(self, change: Callable[[UNet], Any]) -> None:
        change(self.ours)
        change(self.twin)

    def away(self) -> list[str]:
        return [n.removesuffix(".weight") for n, p in self.ours.named_parameters() if p.device.type == "cpu"]

    def held(self) -> float:
        """What the weights have of the GPU, of what they have in half precision."""
        held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self.ours.parameters() if t.is_cuda}
        return (sum(held.values()) + self.acc.arena.banks.held) / sum(p.nbytes for p in self.twin.parameters())


def test_bytes_of_the_unet(card: Card) -> None:  # noqa: F811
    on = On()
    for _ in range(13):
        assert on.error() < 0.06
    assert sorted(on.away()) == sorted(IN_8_BITS)
    told = on.acc.status()["eight_bits"]
    assert told["kept"] == [] and told["reason"] is None
    (plan,) = on.acc.plans.values()
    assert plan.resident and plan.has_graph and plan.fused["eight_bits_conv"] == 6
    stay = sum(p.nbytes for n, p in on.twin.named_parameters() if n.removesuffix(".weight") not in IN_8_BITS)
    size = sum(p.nbytes for p in on.twin.parameters())
    rows = sum(p.shape[0] for n, p in on.twin.named_parameters() if n.removesuffix(".weight") in IN_8_BITS)
    assert on.held() == pytest.approx((stay + (size - stay) / 2 + 12 * rows) / size, abs=0.02)
    assert on.acc.report.counter("errors") == 0


def test_sdxl_would_take_what_is_asked() -> None:
    # of its 2,567 million values, by kind: linears of transformers, keys and values of the prompt, convolutions
    half, rows = 2567.5, 0.4 + 2 * 0.17
    linears, prompt, convolutions = 1843.0, 341.0, 296.0
    held = half - (linears + prompt + convolutions) / 2 + 12 * rows / 2
    assert held / half < ASKED


CHANGES: dict[str, Callable[[UNet], Any]] = {
    "a convolution": lambda m: m.one.conv2.weight.mul_(-1.4),
    "a channel": lambda m: m.three.conv1.weight[5].mul_(3),
    "a tap": lambda m: m.two.conv1.weight[:, :, 1, 2].mul_(-2),
    "a convolution, uncounted": lambda m: m.two.conv2.weight.data.neg_(),
    "a convolution, replaced": lambda m: setattr(
        m.three.conv2, "weight", nn.Parameter(-m.three.conv2.weight.detach(), requires_grad=False)),
    "a convolution, channels last": lambda m: setattr(m.one.conv1.weight, "data",
        (m.one.conv1.weight.detach() * -1.2).contiguous(memory_format=torch.channels_last)),
    "keys": lambda m: m.cross[0].to_k.weight.mul_(-1.5),
    "values, uncounted": lambda m: m.cross[1].to_v.weight.data.neg_(),
    "a row of values": lambda m: m.cross[1].to_v.weight[3].mul_(-2),
    "what stays": lambda m: m.down.weight.neg_(),
}  # fmt: skip


def test_changes_are_followed(card: Card) -> None:  # noqa: F811
    on = On()
    for _ in range(13):
        on.error()
    for how, change in CHANGES.items():
        on.both(change)
        on.acc.new_generation()
        assert on.error() < 0.08 and on.error() < 0.08, how
        assert sorted(on.away()) == sorted(IN_8_BITS), how
    assert on.acc.report.counter("errors") == 0


def test_the_original_has_its_weights_as_the_host_laid_them(card: Card) -> None:  # noqa: F811
    on = On()
    strides = {n: p.stride() for n, p in on.ours.named_parameters()}
    for _ in range(2):
        # the plan without 8 bits lays them channels last
        on.acc.configure(OFF)
        assert on.error() < 0.01 and on.error() < 0.01
        on.acc.configure(CARD)
        assert on.error() < 0.06 and on.error() < 0.06 and sorted(on.away()) == sorted(IN_8_BITS)
        aside = {n.removesuffix(".weight"): p for n, p in on.ours.named_parameters() if p.device.type == "cpu"}
        assert all(p.stride() == strides[f"{n}.weight"] for n, p in aside.items())
        seen: list[tuple[int, ...]] = []

        def note(module: nn.Module, given: Any, result: Tensor, seen: list[Any] = seen) -> None:
            seen.append(result.stride())

        hooks = [m.two.conv1.register_forward_hook(note) for m in (on.ours, on.twin)]
        assert on.error() < 1e-6 and len(seen) == 2 and seen[0] == seen[1] and not on.away()
        assert {n: p.stride() for n, p in on.ours.named_parameters()} == strides
        for hook in hooks:
            hook.remove()
    on.acc.release()
    assert {n: p.stride() for n, p in on.ours.named_parameters()} == strides and not on.away()
    assert on.acc.report.counter("errors") == 0


def test_what_is_let_go_as_banks_are_filled_is_in_no_order(card: Card) -> None:  # noqa: F811
    on = On()
    assert on.error() < 0.06 and on.error() < 0.06
    context, order = on.acc._context, on.acc.arena._tracked.order
    # a plan without 8 bits lays weights channels last, and the original has them in its order
    context.model.eight_bits.reason = reasons.EIGHT_BITS_NO_GAIN()
    assert on.error(16) < 0.02
    with torch.enable_grad():
        on.ours(torch.randn(2, 4, 12, 12).to(HALF).cuda(), torch.randn(2, 7, PROMPT).to(HALF).cuda())
    assert order._differing()
    context.model.eight_bits.reason = None
    residency.clear_way(context)
    with context.arena.exclusively(torch.device("cuda", 0)):
        context.arena.resident.fill(context.arena.resident.due(), quantise_weights.launch)
    assert all(weight.bound is not None and weight.tensor.device.type != "meta" for weight in order._differing())
    assert on.error() < 0.06 and sorted(on.away()) == sorted(IN_8_BITS) and on.acc.report.counter("errors") == 0


def test_a_prompt_with_outliers_is_rotated(card: Card) -> None:  # noqa: F811
    on = On(outlier=True)
    for _ in range(3):
        assert on.error() < 0.06
    assert "cross.0.to_k" in on.away()
    groups = {bank.group for bank in on.acc.arena.banks.resident() if bank.rows.shape[1] == PROMPT}
    assert groups == {128}


def test_several_sizes_and_one_whose_images_are_small(card: Card) -> None:  # noqa: F811
    on = On()
    for size in (12, 8, 16):
        for _ in range(2):
            assert on.error(size) < 0.07
        assert sorted(on.away()) == sorted(IN_8_BITS)
    assert len(on.acc.plans) == 3 and all(plan.resident for plan in on.acc.plans.values())


@pytest.mark.parametrize("config", [CARD, OFF], ids=["8 bits", "half precision"])
def test_after_the_release_no_memory_waits_for_garbage_collection(card: Card, config: Config) -> None:  # noqa: F811
    on = On()
    on.acc.configure(config)
    for _ in range(3):
        on.error()
    gc.collect()
    gc.disable()
    try:
        on.acc.release()
        size = sum(p.nbytes for p in on.twin.parameters())
        assert card.allocated == pytest.approx(size, abs=4096)
    finally:
        gc.enable()
