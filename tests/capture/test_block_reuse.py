"""What is recorded once and copied is what recording it again would give."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from decimal import Decimal

import kitchen_standin
import numpy as np
import pytest
import torch
from torch import fx, nn

from sfast_ext.behaviour import structure
from sfast_ext.capture import block_reuse
from sfast_ext.capture.fake_trace import record
from sfast_ext.weights.weight import places_of


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


class Block(nn.Module):
    """Five layers, so that it is worth copying."""

    def __init__(self, width=4, gain=1.0):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        self.norm, self.act = nn.LayerNorm(width), nn.SiLU()
        self.gain = gain
        self.calls = []

    def forward(self, x, emb=None, scale=1.0):
        y = self.c(self.act(self.b(self.norm(x)) + self.a(x))) * self.gain
        return x + y * scale if emb is None else x + y + emb


class Stack(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def described(gm):
    """Each node with where its arguments come from; an attribute by the tensor that it is."""
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    found = []
    for node in gm.graph.nodes:
        target = node.target
        if node.op == "get_attr":
            held = getattr(gm, node.target)
            # a constant of the forward's own is made anew each time
            target = id(held) if isinstance(held, nn.Parameter) else held.shape
        value = node.meta.get("val")
        meta = (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else None
        found.append((node.op, target, str(fx.node.map_arg((node.args, node.kwargs), place.__getitem__)), meta))
    return found


def copies(monkeypatch):
    """Counts what is copied."""
    made = []
    original = block_reuse._copy

    def counted(known, module, *rest):
        made.append(module)
        return original(known, module, *rest)

    monkeypatch.setattr(block_reuse, "_copy", counted)
    return made


def check(module, monkeypatch, expected, *inputs):
    """The graph is that of a plain recording, and this many modules were copied into it."""
    made = copies(monkeypatch)
    inputs = inputs or (torch.randn(2, 4),)
    plain = record(lambda *x: [module(*x)], inputs)
    # targets of placeholders are names
    quick = record(lambda *x: [module(*x)], inputs, module)
    assert described(quick) == described(plain)
    assert len(made) == expected
    torch.testing.assert_close(quick(*inputs), [module(*inputs)])
    assert all("forward" not in vars(m) for m in module.modules())


def test_blocks_of_one_kind_are_recorded_once(monkeypatch):
    check(Stack(*[Block() for _ in range(4)]), monkeypatch, 3)


def test_the_code_of_a_kind_of_block_is_read_once(monkeypatch):
    read = []
    original = structure.names_within
    monkeypatch.setattr(structure, "names_within", lambda *these: read.append(these) or original(*these))
    # each block in a stack of its own, whose blocks are compared as well
    check(Stack(*[Stack(Block(), Block()) for _ in range(3)]), monkeypatch, 3)
    assert len(read) == 2


class Settings:
    __slots__ = ("gain",)

    def __init__(self, gain):
        self.gain = gain


SETTINGS = {
    "numpy's numbers": (np.float32, float),
    "boxes": (lambda gain: [(gain,)], lambda held: held[0][0]),
    "sets": (lambda gain: {gain}, lambda held: next(iter(held))),
    "slots": (Settings, lambda held: held.gain),
    "arrays": (lambda gain: np.full(3, gain), lambda held: float(held[1])),
    "far inside": (lambda gain: {"a": [{"b": (Settings([gain]),)}]}, lambda held: held["a"][0]["b"][0].gain[0]),
    "many": (lambda gain: [1.0] * 99 + [gain], lambda held: held[-1]),
    "decimals": (lambda gain: Decimal(str(gain)), float),
    "closures": (lambda gain: lambda: gain, lambda held: held()),
    "partials": (lambda gain: functools.partial(max, gain), lambda held: held(0.0)),
}


class WithSettings(Block):
    def __init__(self, settings, read):
        super().__init__()
        self.settings, self.read = settings, read

    def forward(self, x):
        return super().forward(x) * self.read(self.settings)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_any_kind_tell_blocks_apart(name, monkeypatch):
    make, read = SETTINGS[name]
    first, again = make(1.0), make(1.0)
    # a function is told by its identity
    again = first if name == "closures" else again
    check(Stack(*[WithSettings(each, read) for each in (first, make(1.1), again, make(1.2))]), monkeypatch, 1)


def test_blocks_with_a_value_that_cannot_be_compared_are_each_recorded(monkeypatch):
    blocks = [WithSettings((1.0, iter([])), lambda held: held[0]) for _ in range(3)]
    check(Stack(*blocks), monkeypatch, 0)


@pytest.mark.parametrize("tied", [1, 0])
def test_weights_that_are_one_tell_blocks_apart(tied, monkeypatch):
    blocks = [Block() for _ in range(4)]
    blocks[tied].b.weight = blocks[tied].a.weight
    check(Stack(*blocks), monkeypatch, 2)


def test_weights_that_are_one_in_two_blocks(monkeypatch):
    blocks = [Block() for _ in range(4)]
    blocks[2].b.weight = blocks[0].a.weight
    check(Stack(*blocks), monkeypatch, 3)


def test_each_width_and_each_setting_is_recorded(monkeypatch):
    class Widths(nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow, self.wide = Stack(*[Block(4) for _ in range(2)]), Stack(*[Block(8) for _ in range(2)])
            self.loud = Stack(Block(4, 2.0), Block(4, 3.0))

        def forward(self, x):
            x = self.loud(self.narrow(x))
            return self.wide(torch.cat([x, x], 1))

    check(Widths(), monkeypatch, 2)


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("name", ["tiny-sd15", "tiny-sdxl"])
def test_a_unet_is_recorded_alike(name, monkeypatch):
    models = pytest.importorskip("sfast_ext.tools.lib.models")
    pytest.importorskip("diffusers")
    unet = models.random_unet(name, dtype=torch.float32, device="cpu")
    args, kwargs = models.unet_inputs(unet, 64, 64)
    sample, steps, context = args[0], args[1], args[2] if len(args) > 2 else kwargs["encoder_hidden_states"]
    more = {k: v for k, v in kwargs.items() if k not in ("encoder_hidden_states", "return_dict")}
    made = copies(monkeypatch)

    def run(sample, context):
        return [unet(sample, steps, encoder_hidden_states=context, return_dict=False, **more)[0]]

    # the first of all makes the constants that a UNet keeps
    record(run, (sample, context))
    made.clear()
    assert described(record(run, (sample, context), unet)) == described(record(run, (sample, context)))
    assert len(made) > 4


def test_keyword_arguments_and_two_uses_of_one_block(monkeypatch):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = Block(), Block()

        def forward(self, x, emb):
            x = self.other(self.one(x, emb=emb), emb=emb)
            return self.one(x, emb=x) + self.one(x, scale=0.5) + self.other(x, scale=0.25)

    # one argument in two places is unlike two arguments; a number is part of the call
    check(Twice(), monkeypatch, 1, torch.randn(2, 4), torch.randn(2, 4))


class Writing(Block):
    def forward(self, x):
        x.mul_(2)
        return super().forward(x)


class HandingOn(Block):
    def forward(self, x):
        super().forward(x)
        return x[:1]


class WithConstant(Block):
    def forward(self, x):
        return super().forward(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])


class WithBuffer(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(4))

    def forward(self, x):
        return super().forward(x) + self.table


class ReadingOthers(Block):
    other = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return super().forward(x) + ReadingOthers.other


@pytest.mark.parametrize("kind", [Writing, HandingOn, WithConstant, WithBuffer, ReadingOthers])
def test_what_is_not_copied(kind, monkeypatch):
    made = copies(monkeypatch)
    module = Stack(*[kind() for _ in range(3)])
    inputs = (torch.randn(2, 4),)
    assert described_but_constants(record(lambda x: [module(x)], inputs, module)) == described_but_constants(
        record(lambda x: [module(x)], inputs)
    )
    assert made == []


def described_but_constants(gm):
    return [node[::2] for node in described(gm)]


def test_patched_and_hooked_blocks_are_recorded_each(monkeypatch):
    module = Stack(*[Block() for _ in range(4)])
    module.blocks[1].forward = lambda x: x * 2
    module.blocks[2].register_forward_hook(lambda m, args, out: out * 3)
    made = copies(monkeypatch)
    inputs = (torch.randn(2, 4),)
    graph = record(lambda x: [module(x)], inputs, module)
    torch.testing.assert_close(graph(*inputs), [module(*inputs)])
    assert made == [module.blocks[3]]
    assert "forward" in vars(module.blocks[1]) and "forward" not in vars(module.blocks[0])


def test_settings_in_processors_tell_blocks_apart(monkeypatch):
    class Scaled:
        def __init__(self, scale):
            self.scale = scale

    blocks = [Block() for _ in range(3)]
    for block, scale in zip(blocks, (1.0, 1.0, 2.0)):
        block.processor = Scaled(scale)
    check(Stack(*blocks), monkeypatch, 1)


def test_where_copying_fails_everything_is_recorded(monkeypatch):
    module = Stack(*[Block() for _ in range(3)])
    inputs = (torch.randn(2, 4),)
    plain = described(record(lambda x: [module(x)], inputs))

    def broken(*args):
        raise RuntimeError("torch is not as expected")

    monkeypatch.setattr(block_reuse, "set_proxy_slot", broken)
    assert described(record(lambda x: [module(x)], inputs, module)) == plain
    monkeypatch.setattr(block_reuse, "SUPPORTED", False)
    assert described(record(lambda x: [module(x)], inputs, module)) == plain


def test_an_error_of_the_forward_is_passed_on_and_forwards_come_back():
    class Failing(Block):
        def forward(self, x):
            raise ValueError("of the model itself")

    module = Stack(Failing(), Failing())
    with pytest.raises(ValueError, match="of the model itself"):
        record(lambda x: [module(x)], (torch.randn(2, 4),), module)
    assert all("forward" not in vars(m) for m in module.modules())


class InEightBits(Block):
    def __init__(self, layouts=(kitchen_standin.FP8,) * 3, **fields):
        super().__init__()
        for name, layout in zip("abc", layouts):
            made = kitchen_standin.Layer(4, 4, layout, **(fields if name == "c" else {}))
            setattr(self, name, made)
        self.requires_grad_(False)


FP8, INT8 = kitchen_standin.FP8, kitchen_standin.INT8


def recorded_weights(net):
    """The weights that each product of a record reads, of both ways to record."""
    found = []
    for one_by_one in (False, True):
        with block_reuse.one_by_one() if one_by_one else contextlib.nullcontext():
            gm = record(net, [torch.randn(2, 4)], net)
        held = {id(tensor): path for path, (c, n) in places_of(net).items() for tensor in (c[n],)}
        found.append([held.get(id(getattr(gm, n.target))) for n in gm.graph.nodes if n.op == "get_attr"])
    return found


def test_blocks_whose_weights_are_made_of_others_are_copied(monkeypatch):
    made = copies(monkeypatch)
    net = Stack(*[InEightBits() for _ in range(3)])
    copied, one_by_one = recorded_weights(net)
    assert made == [net.blocks[1], net.blocks[2]]
    assert copied == one_by_one and "blocks.2.c.weight._qdata" in copied


@pytest.mark.parametrize("second", [
    {"layouts": (FP8, FP8, INT8)}, {"layouts": (FP8, None, FP8)}, {"rows": True}, {"dtype": torch.float16},
    {"layouts": (FP8, FP8, kitchen_standin.FP8_WIDE)},
])  # fmt: skip
def test_a_block_with_a_weight_of_another_form_is_not_copied(monkeypatch, second):
    made = copies(monkeypatch)
    net = Stack(InEightBits(), InEightBits(**second))
    copied, one_by_one = recorded_weights(net)
    assert made == [] and copied == one_by_one


def test_a_field_makes_another_form(monkeypatch):
    made = copies(monkeypatch)
    net = Stack(*[InEightBits((INT8,) * 3) for _ in range(2)])
    weight = net.blocks[1].c.weight
    weight._params = dataclasses.replace(weight._params, convrot_groupsize=64)
    recorded_weights(net)
    assert made == []
