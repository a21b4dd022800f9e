from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import eight_bit_kernels
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sfast_ext.kernels.eight_bits import (
    add_group_norm8,
    cat_group_norm8,
    conv2d8,
    gain,
    group_norm8,
    quantise_rows,
    quantise_weights,
)
from sfast_ext.passes.eight_bits import eight_bits
from sfast_ext.passes.eight_bits_conv import eight_bits_conv
from sfast_ext.passes.eight_bits_conv_match import conv_candidates
from sfast_ext.passes.eight_bits_selection import LIMIT, Selection, errors_of_convolution, relative
from sfast_ext.passes.group_norm import group_norm
from sfast_ext.passes.group_norm_inputs import group_norm_inputs

from .support import OTHER_CONVOLUTIONS, Traced, randn
from .transformers import HALF, rewritten, traced

KERNELS = (conv2d8, group_norm8, add_group_norm8, cat_group_norm8)
C = 64
IMAGE = randn(2, C, 12, 11)
EMBEDDING = randn(2, 96)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    eight_bit_kernels.available(monkeypatch, by_triton=True)


class Residual(nn.Module):
    """A residual block of a UNet."""

    def __init__(self, width: int = C, out: int = C) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, out)
        self.conv1, self.conv2 = nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(96, out)
        self.shortcut = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(embedding)[:, :, None, None]
        return self.conv2(F.silu(self.norm2(y))) + self.shortcut(x)


class Blocks(nn.Module):
    """The ends of a UNet, and a skip connection between."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, C, 3, padding=1), nn.Conv2d(C, 4, 3, padding=1)
        self.one, self.two, self.three = Residual(), Residual(), Residual(2 * C, C)
        self.norm = nn.GroupNorm(8, C)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        x = self.one(self.conv_in(x), embedding)
        x = self.three(torch.cat([self.two(x, embedding), x], 1), embedding)
        return self.conv_out(F.silu(self.norm(x)))


def counted(on: Traced, ops: Counter[str]) -> dict[str, int]:
    names = [kernel.__name__.rpartition(".")[2] for kernel in KERNELS]
    return {name: ops[name] for name in (*names, "quantise_weights") if ops[name]}


def test_residual_blocks() -> None:
    torch.manual_seed(0)
    on = traced(Blocks(), randn(2, 4, 13, 12), EMBEDDING)
    ops = rewritten(on)
    assert counted(on, ops) == {
        "conv2d8": 6, "group_norm8": 5, "cat_group_norm8": 1, "quantise_weights": 1,
    }  # fmt: skip
    # both ends stay, and the shortcut is a linear layer
    assert ops["group_norm"] == 1 and ops["narrow_conv"] == 2 and not ops["bias_add"]
    assert on.error() < 0.04
    selection = on.ctx.eight_bits
    assert selection is not None and not selection.kept
    assert sorted(selection.errors) == [f"{n}.conv{i}" for n in ("one", "three", "two") for i in (1, 2)]
    assert all(0.005 < error.least < 0.025 for error in selection.errors.values())


def test_weights_that_change_in_place_are_followed() -> None:
    torch.manual_seed(0)
    module = Blocks().to(HALF)
    on = traced(module, randn(2, 4, 13, 12), EMBEDDING)
    rewritten(on)
    before = on.outputs()[0]
    for factor, weight in ((3.0, module.two.conv1.weight), (-2.0, module.three.conv2.weight)):
        with torch.no_grad():
            weight[1::2] *= factor
            on.expected = module(*on.inputs)
        assert on.error() < 0.06
    assert not torch.equal(before, on.outputs()[0])


def test_what_follows_is_added_by_the_kernel() -> None:
    torch.manual_seed(0)
    on = traced(Residual(), IMAGE, EMBEDDING)
    ops = rewritten(on)
    first, second = on.launches(conv2d8)
    # the embedding and the first bias are added by the second norm
    assert first.args[4:] == (None, None) and on.launches(group_norm8)[1].kwargs["shift"] is not None
    assert second.args[4].meta["weight"].path == "conv2.bias" and second.args[5].meta["val"].shape == IMAGE.shape
    assert ops["bias_add"] == 0 and on.error() < 0.03


class Wrapped(nn.Module):
    """`body` of a few layers."""

    def __init__(self, body: Callable[..., Any], width: int = C, columns: int = C, **options: Any) -> None:
        super().__init__()
        self.body, self.norm, self.other = body, nn.GroupNorm(4, width), nn.GroupNorm(4, columns)
        self.conv = nn.Conv2d(width, columns, **({"kernel_size": 3, "padding": 1} | options))
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.bare = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.linear, self.weight = nn.Linear(width, width), nn.Parameter(torch.randn(columns, width, 3, 3) * 0.03)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def count(body: Callable[..., Any], x: Tensor = IMAGE, half: bool = True, **more: Any) -> tuple[Traced, Counter[str]]:
    torch.manual_seed(0)
    on = traced(Wrapped(body, x.shape[1], **more), x, half=half)
    return on, rewritten(on)


def plain(m: Wrapped, x: Tensor) -> Any:
    return m.conv(F.silu(m.norm(x))).sin()


def without_silu(m: Wrapped, x: Tensor) -> Any:
    return m.conv(m.norm(x.cos())).sin()


def without_bias(m: Wrapped, x: Tensor) -> Any:
    return m.bare(F.silu(m.norm(x.cos()))).sin()


def of_a_sum(m: Wrapped, x: Tensor) -> Any:
    total = x.cos() + x
    return m.conv(F.silu(m.norm(total))).sin(), total.sin()


def of_a_sum_of_a_convolution(m: Wrapped, x: Tensor) -> Any:
    total = m.second(x.cos()) + x
    return m.conv(F.silu(m.norm(total))).sin(), total.sin()


def onto_a_residual(m: Wrapped, x: Tensor) -> Any:
    return (x + m.conv(F.silu(m.norm(x)))).sin()


def onto_a_residual_by_half(m: Wrapped, x: Tensor) -> Any:
    return ((x + m.conv(F.silu(m.norm(x)))) * 0.5).sin()


def onto_a_norm_twice(m: Wrapped, x: Tensor) -> Any:
    y = m.bare(F.silu(m.norm(x)))
    return F.silu(m.other(y + y)).sin()


def a_concatenation_of_one(m: Wrapped, x: Tensor) -> Any:
    y = m.conv(F.silu(m.norm(x)))
    return F.group_norm(torch.cat([y, y], 1), 8).sin()


def two_sums(m: Wrapped, x: Tensor) -> Any:
    y = m.conv(F.silu(m.norm(x)))
    return (x + y).sin(), (x * y).cos()


def a_convolution_twice(m: Wrapped, x: Tensor) -> Any:
    y = m.bare(F.silu(m.norm(x)))
    return (y + y).sin()


def onto_a_norm(m: Wrapped, x: Tensor) -> Any:
    total = m.conv(F.silu(m.norm(x))) + x
    return F.silu(m.other(total)).sin(), total.cos()


def into_a_concatenation(m: Wrapped, x: Tensor) -> Any:
    y = m.conv(F.silu(m.norm(x))) + x
    joined = torch.cat([y, x], 1)
    return F.group_norm(joined, 8).sin(), joined.cos()


def as_the_second_of_a_concatenation(m: Wrapped, x: Tensor) -> Any:
    joined = torch.cat([x, m.conv(F.silu(m.norm(x)))], 1)
    return F.group_norm(joined, 8).sin(), joined.cos()


@pytest.mark.parametrize(
    ("body", "norm"),
    [
        (plain, "group_norm8"),
        (without_silu, "group_norm8"),
        (without_bias, "group_norm8"),
        (of_a_sum, "add_group_norm8"),
        (of_a_sum_of_a_convolution, "add_group_norm8"),
        (onto_a_residual, "group_norm8"),
        (onto_a_residual_by_half, "group_norm8"),
        (onto_a_norm_twice, "group_norm8"),
        (a_concatenation_of_one, "group_norm8"),
        (two_sums, "group_norm8"),
        (a_convolution_twice, "group_norm8"),
        (onto_a_norm, "group_norm8"),
        (into_a_concatenation, "group_norm8"),
        (as_the_second_of_a_concatenation, "group_norm8"),
    ],
)
def test_a_convolution_behind_a_norm(body: Callable[..., Any], norm: str) -> None:
    on, ops = count(body)
    assert counted(on, ops) == {"conv2d8": 1, norm: 1, "quantise_weights": 1}
    assert on.error() < 0.03


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(2, 64, 32, 31), (1, 128, 33, 40), (3, 192, 26, 24)])
def test_strides_and_sizes(stride: int, size: tuple[int, ...]) -> None:
    on, ops = count(plain, randn(*size), stride=stride, columns=96)
    assert ops["conv2d8"] == 1 and on.error() < 0.03


def another_reader_of_the_norm(m: Wrapped, x: Tensor) -> Any:
    y = F.silu(m.norm(x))
    return m.conv(y).sin(), y.cos()


def two_convolutions_of_one_norm(m: Wrapped, x: Tensor) -> Any:
    y = F.silu(m.norm(x))
    return m.conv(y).sin(), m.second(y).cos()


def without_a_norm(m: Wrapped, x: Tensor) -> Any:
    return m.conv(F.silu(x)).sin()


def behind_an_upsampling(m: Wrapped, x: Tensor) -> Any:
    return m.conv(F.interpolate(F.silu(m.norm(x)), scale_factor=2.0)).sin()


def by_a_computed_weight(m: Wrapped, x: Tensor) -> Any:
    return F.conv2d(F.silu(m.norm(x)), m.weight * 2, padding=1).sin()


def a_norm_that_is_written(m: Wrapped, x: Tensor) -> Any:
    y = m.norm(x)
    z = m.conv(y)
    return y.add_(1).cos(), z.sin()


def by_a_layer_norm(m: Wrapped, x: Tensor) -> Any:
    return m.conv(F.layer_norm(x, x.shape[1:])).sin()


def a_convolution_in_full_precision(m: Wrapped, x: Tensor) -> Any:
    return F.conv2d(m.norm(x).float(), m.weight.float(), padding=1).sin()


@pytest.mark.parametrize(
    "body",
    [
        another_reader_of_the_norm, two_convolutions_of_one_norm, without_a_norm, behind_an_upsampling,
        by_a_computed_weight, a_norm_that_is_written, by_a_layer_norm, a_convolution_in_full_precision,
    ],
)  # fmt: skip
def test_others_are_left_alone(body: Callable[..., Any]) -> None:
    on, ops = count(body)
    assert not counted(on, ops) and on.error() < 2e-2
    assert on.ctx.eight_bits is not None and "no layer" in str(on.ctx.eight_bits.obstacle)


@pytest.mark.parametrize("options", [o for o in OTHER_CONVOLUTIONS if "stride" not in o], ids=str)
def test_other_convolutions_are_left_alone(options: dict[str, Any]) -> None:
    assert count(plain, **options)[1]["conv2d8"] == 0


@pytest.mark.parametrize(
    ("size", "columns", "taken"),
    [
        ((2, 64, 12, 11), 32, True),
        ((2, 64, 12, 11), 48, False),
        ((2, 64, 12, 11), 4, False),
        ((2, 96, 12, 11), 64, False),
        ((2, 32, 12, 11), 64, False),
        ((1, 64, 16, 16), 64, True),
        ((1, 64, 15, 17), 64, False),
        ((2, 64, 8, 8), 64, False),
    ],
    ids=str,
)
def test_sizes_that_the_kernels_take_and_that_pay(size: tuple[int, ...], columns: int, taken: bool) -> None:
    assert count(plain, randn(*size), columns=columns)[1]["conv2d8"] == taken


def test_sizes_that_are_not_profitable_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(conv2d8, "profitable", lambda *sizes: asked.append(sizes[:3]) and False)
    assert count(plain, columns=32)[1]["conv2d8"] == 0
    assert set(asked) == {(2 * 12 * 11, 32, 9 * C)}


@pytest.mark.parametrize(
    ("card", "taken"),
    [((7, 5), True), ((8, 0), True), ((8, 6), True), ((8, 9), True), ((9, 0), True), ((12, 0), True)],
)
def test_cards_on_which_it_pays(monkeypatch: pytest.MonkeyPatch, card: tuple[int, int], taken: bool) -> None:
    monkeypatch.setattr(conv2d8.triton_runtime, "capability", lambda device: card)
    monkeypatch.setattr(gain, "rates", lambda device: gain.Rates(5e8, 1e9, 4.9e6))
    cuda = torch.device("cuda")
    assert conv2d8.profitable(8192, 640, 9 * 640, cuda) == taken
    # Hopper's instructions are for stride 1, and for tiles of 80 channels
    for other in ((8192, 640, 5760, cuda, 2), (8192, 672, 5760, cuda, 1)):
        assert conv2d8.profitable(*other) == (card[0] != 9)
    assert not conv2d8.profitable(256, 32, 9 * 64, cuda) and conv2d8.profitable(1, 1, 1, torch.device("cpu"))


def test_full_precision_is_left_alone() -> None:
    assert count(plain, half=False)[1]["conv2d8"] == 0


def test_nothing_without_the_setting_without_kernels_or_for_rare_calls() -> None:
    known = count(plain)[0].ctx.eight_bits  # by another plan
    for change in ({"eight_bits": None}, {"triton": False}, {"most_bytes": 1 << 40}):
        on = traced(Wrapped(plain), IMAGE, selection=known)
        for name, value in change.items():
            setattr(on.ctx, name, value)
        assert rewritten(on)["conv2d8"] == 0


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__.rpartition(".")[2])
def test_nothing_without_one_of_the_kernels(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    enabled = type(kernel.launch).enabled
    monkeypatch.setattr(
        type(kernel.launch), "enabled", lambda self, device: self is not kernel.launch and enabled(self, device)
    )
    on, ops = count(onto_a_norm)
    assert not counted(on, ops) and on.error() < 1e-2


def test_layers_that_would_be_too_far_off_stay() -> None:
    """One pixel of one channel is fifty times the others: what is left of them is coarse."""
    image = IMAGE.clone()
    image[1, 3, 5, 5] = 1e3
    on, ops = count(plain, image)
    selection = on.ctx.eight_bits
    assert selection is not None and not counted(on, ops) and on.error() < 2e-2
    ((name, error),) = selection.listed()
    assert name == "conv" and LIMIT < error < 1 and selection.errors["conv"].least == error
    assert "layer" in str(selection.obstacle)


def test_the_error_of_a_layer_is_that_of_its_convolution() -> None:
    sizes = (1, (2, 64, 12, 11), 40), (2, (1, 64, 33, 32), 40), (1, (3, 64, 40, 50), 40), (1, (1, 64, 9, 9), 600)
    for stride, size, columns in sizes:
        x, weight = randn(*size), randn(columns, 64, 3, 3)
        rows, row_scale = quantise_rows.reference(weight.permute(0, 2, 3, 1).flatten(1))
        for silu in (False, True):
            factor = torch.ones(64)
            factor[3] = 4
            q, scale = group_norm8.reference(x, 8, factor, None, 1e-5, None, silu)
            y = F.group_norm(x, 8, factor, None, 1e-5)
            y = F.silu(y) if silu else y
            found = relative(errors_of_convolution(y, weight, stride, silu).tolist())
            exact = F.conv2d(y, weight, stride=stride, padding=1)
            given = q, scale, rows, row_scale.expand(2, -1)
            made = conv2d8.reference(*given, None, None, stride, torch.float32)
            wanted = (made - exact).norm() / exact.norm()
            assert found[0] == found[1] and abs(found[0] / wanted - 1) < 0.1, (found, wanted)


def test_the_count_is_that_of_convolutions() -> None:
    for body, layers in ((plain, 1), (without_a_norm, 0)):
        torch.manual_seed(0)
        on = traced(Wrapped(body), IMAGE)
        with torch.no_grad():
            assert on.rewrite(group_norm, eight_bits, group_norm_inputs, eight_bits_conv) == layers
    assert on.rewrite(eight_bits_conv) == 0


def test_the_selection_of_another_plan_is_kept_to() -> None:
    torch.manual_seed(0)
    first = traced(Blocks(), randn(2, 4, 13, 12), EMBEDDING)
    rewritten(first)
    selection = first.ctx.eight_bits
    assert selection is not None
    selection.kept |= {"one.conv1", "three.conv2"}
    torch.manual_seed(0)
    on = traced(Blocks(), randn(2, 4, 14, 13), EMBEDDING, selection=selection)
    assert rewritten(on)["conv2d8"] == 4 and on.error() < 0.04
    names = {argument.args[2].args[0] for argument in on.launches(conv2d8)}
    assert len(names) == 1  # of one quantise_weights


def test_too_little_room_for_the_second_copy() -> None:
    needed = 9 * C * C + C * 48
    for room, layers in ((needed - 1, 0), (needed, 1)):
        on = traced(Wrapped(plain), IMAGE)
        on.ctx.eight_bits.room = room
        assert rewritten(on)["conv2d8"] == layers
        assert len(on.arena.banks) == layers and on.arena.banks.bytes == layers * needed


def test_candidates_before_and_after() -> None:
    on = traced(Wrapped(plain), IMAGE)
    assert not conv_candidates(on.graph, on.ctx)  # the norm is no kernel yet
    rewritten(on)
    assert not conv_candidates(on.graph, on.ctx)
    (fresh,) = on.launches(quantise_weights)
    (rows,) = fresh.args[1]
    assert rows.meta["val"].shape == (C, 9 * C)
    assert isinstance(on.ctx.eight_bits, Selection)
