"""Patches as third parties write them, each the text of a module of theirs; `random_patches.py` runs them in a host.

A module's `lay(unet, seed, start)` puts its patch on the UNet and gives two functions: one takes it away, the other,
if there is one, changes its number. `STEP` is set before each step. What a patch does follows from these alone, not
from how often it is called: the extension under test calls what it compares with more often than the host does.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

HOMES = ("extension", "script", "package")
"""Where such a module lies: in a WebUI's extension, in the WebUI's own `scripts`, among Python's packages."""

# where a patch keeps its number: lines of `lay`, and the number in the patch itself
KEEPS: dict[str, tuple[str, str]] = {
    "constant": ("amount = start\nturn = None", "amount"),
    "cell": ("amount = start\ndef turn(value):\n    nonlocal amount\n    amount = value", "amount"),
    "list": ("kept = [start]\ndef turn(value):\n    kept[0] = value", "kept[0]"),
    "object": ("kept = SimpleNamespace(by=start)\ndef turn(value):\n    kept.by = value", "kept.by"),
    "settings": ("settings.by = start\ndef turn(value):\n    settings.by = value", "settings.by"),
    "global": (
        "global STRENGTH\nSTRENGTH = start\ndef turn(value):\n    global STRENGTH\n    STRENGTH = value",
        "STRENGTH",
    ),
}
KEEPS["step"] = (KEEPS["global"][0], "STRENGTH * (1.0 + 0.25 * STEP)")
ALL = tuple(KEEPS)
IN_MODULE = ("settings", "global", "step")
OWN = ("own",)
"""For a patch that keeps its number in a way of its own."""


@dataclass(frozen=True)
class Site:
    """One kind of patch.

    Args:
        code: of its module, with AMOUNT for the number and KEEP for the lines that keep it.
        low, high: the number's range.
        group: patches of one group are taken away in the reverse order; in any order if it is empty.
        turns: whether the number can be changed while the patch is laid; for `OWN` alone.
    """

    code: str
    low: float = 2.0
    high: float = 6.0
    keeps: tuple[str, ...] = ALL
    hosts: tuple[str, ...] = ("a1111", "sdnext")
    group: str = "modules"
    turns: bool = True


NAMES: dict[str, dict[str, str]] = {
    "a1111": {
        "ATTENTION": "('CrossAttention',)",
        "BLOCKS": "('ResBlock', 'BasicTransformerBlock', 'SpatialTransformer')",
        "RESIDUAL": "('ResBlock',)",
        "NORMS": "('GroupNorm32', 'LayerNorm')",
        "INNER": "('BasicTransformerBlock',)",
        "METHOD": "_forward",
    },
    "sdnext": {
        "ATTENTION": "('Attention',)",
        "BLOCKS": "('ResnetBlock2D', 'BasicTransformerBlock', 'FeedForward')",
        "RESIDUAL": "('ResnetBlock2D',)",
        "NORMS": "('GroupNorm', 'LayerNorm')",
        "INNER": "('Transformer2DModel',)",
        "METHOD": "_operate_on_continuous_inputs",
    },
}

PRELUDE = '''
import copy
import functools
from types import SimpleNamespace

import torch
from torch import nn

STEP = 0
STRENGTH = 1.0
settings = SimpleNamespace(by=1.0)


def pick(unet, names, seed):
    found = [module for module in unet.modules() if type(module).__name__ in names]
    return found[seed % len(found)]


def times(output, by):
    return (output[0] * by, *output[1:]) if isinstance(output, tuple) else output * by


def put_back(module, name, original, seed):
    """By assignment, as many do who kept what they found, or by a deletion."""
    if seed % 2:
        setattr(module, name, original)
    else:
        vars(module).pop(name, None)
'''

INSTANCE = """
def lay(unet, seed, start):
    module = {module}
    original = module.{name}
    KEEP

    def scaled(*args, **kwargs):
        return times(original(*args, **kwargs), AMOUNT)

    module.{name} = scaled
    return lambda: put_back(module, "{name}", original, seed), turn
"""
CLASS = """
def lay(unet, seed, start):
    kind = type(pick(unet, {names}, seed))
    original = kind.{name}
    KEEP

    {wraps}
    def scaled(self, *args, **kwargs):
        return times(original(self, *args, **kwargs), AMOUNT)

    kind.{name} = scaled
    return lambda: setattr(kind, "{name}", original), turn
"""
REPLACED = """
def lay(unet, seed, start):
    original = {home}.{name}
    KEEP

    def scaled(*args, **kwargs):
        return original(*args, **kwargs) * AMOUNT

    {home}.{name} = scaled
    return lambda: setattr({home}, "{name}", original), turn
"""
CAT = """
def lay(unet, seed, start):
    original = torch.cat
    KEEP

    def weighing(tensors, *args, **kwargs):
        if len(tensors) == 2 and tensors[0].dim() == 4 and (args == (1,) or kwargs.get("dim") == 1):
            tensors = [tensors[0] * AMOUNT, tensors[1]]
        return original(tensors, *args, **kwargs)

    torch.cat = weighing
    return lambda: setattr(torch, "cat", original), turn
"""
HOOK = """
def lay(unet, seed, start):
    KEEP

    def scaling(module, args, output):
        return times(output, AMOUNT)

    return pick(unet, BLOCKS, seed).register_forward_hook(scaling).remove, turn
"""
PRE_HOOK = """
def lay(unet, seed, start):
    KEEP

    def scaling(module, args):
        return (args[0] * AMOUNT, *args[1:])

    return pick(unet, RESIDUAL, seed).register_forward_pre_hook(scaling).remove, turn
"""
# the very same function each time that it is laid
LASTING_HOOK = """
def scaling(module, args, output):
    return times(output, AMOUNT)


def lay(unet, seed, start):
    KEEP
    return pick(unet, BLOCKS, seed).register_forward_hook(scaling).remove, turn
"""
GLOBAL_HOOK = """
def lay(unet, seed, start):
    KEEP

    def scaling(module, args, output):
        return output * AMOUNT if type(module).__name__ in RESIDUAL else None

    return torch.nn.modules.module.register_module_forward_hook(scaling).remove, turn
"""
GLOBAL_PRE_HOOK = """
def lay(unet, seed, start):
    KEEP

    def scaling(module, args):
        return (args[0] * AMOUNT, *args[1:]) if type(module).__name__ in RESIDUAL else None

    return torch.nn.modules.module.register_module_forward_pre_hook(scaling).remove, turn
"""
ATTRIBUTE = """
def lay(unet, seed, start):
    # every other one, for the image to show it
    modules = [module for module in unet.modules() if type(module).__name__ in {names}][seed % 2 :: 2]
    originals = [module.{name} for module in modules]

    def turn(value):
        for module, original in zip(modules, originals):
            module.{name} = {value}

    def take():
        for module, original in zip(modules, originals):
            module.{name} = original

    turn(start)
    return take, turn
"""
LAYER = """
def lay(unet, seed, start):
    attention = pick(unet, ATTENTION, seed)
    name = ("to_q", "to_k", "to_v")[seed % 3]
    original = getattr(attention, name)
    if seed % 2:
        other = copy.deepcopy(original)
        other.weight.data.mul_(start)
    else:
        other = nn.Linear(original.in_features, original.out_features, bias=original.bias is not None)
        noise = torch.randn(other.weight.shape, generator=torch.Generator().manual_seed(seed))
        other.weight.data = (start * noise * original.in_features**-0.5).to(original.weight)
    other.requires_grad_(original.weight.requires_grad)
    setattr(attention, name, other)
    return lambda: setattr(attention, name, original), None
"""
WRAPPER = """
def lay(unet, seed, start):
    block = pick(unet, ("BasicTransformerBlock",), seed)
    original = block.ff
    KEEP

    class Louder(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs) * AMOUNT

    block.ff = Louder(original)
    return lambda: setattr(block, "ff", original), turn
"""
PROCESSOR = """
def lay(unet, seed, start):
    attention = pick(unet, ATTENTION, seed)
    original = attention.processor
    KEEP

    class Louder:
        def __call__(self, attn, hidden_states, *args, **kwargs):
            return original(attn, hidden_states, *args, **kwargs) * AMOUNT

    attention.processor = Louder()
    return lambda: setattr(attention, "processor", original), turn
"""
# the class is there for as long as its module
LASTING_PROCESSOR = """
class Louder:
    def __init__(self, inner):
        self.inner = inner

    def __call__(self, attn, hidden_states, *args, **kwargs):
        return self.inner(attn, hidden_states, *args, **kwargs) * AMOUNT


def lay(unet, seed, start):
    attention = pick(unet, ATTENTION, seed)
    original = attention.processor
    KEEP
    attention.set_processor(Louder(original))
    return lambda: attention.set_processor(original), turn
"""
ALL_PROCESSORS = """
class Scaled:
    def __init__(self, inner, by):
        self.inner, self.by = inner, by

    def __call__(self, attn, hidden_states, *args, **kwargs):
        return self.inner(attn, hidden_states, *args, **kwargs) * self.by


def lay(unet, seed, start):
    originals = dict(unet.attn_processors)
    scaled = {name: Scaled(inner, start) for name, inner in originals.items()}
    unet.set_attn_processor(dict(scaled))

    def turn(value):
        for each in scaled.values():
            each.by = value

    return lambda: unet.set_attn_processor(dict(originals)), turn
"""
# changes nothing, at every step
COUNTER = """
counted = []


def at_step(step):
    for module in counted:
        module.current_step = step


def lay(unet, seed, start):
    module = pick(unet, BLOCKS, seed)
    module.current_step = STEP
    counted.append(module)

    def take():
        counted.remove(module)
        if module not in counted:
            del module.current_step

    return take, None
"""


def _instance(module: str, name: str) -> str:
    return INSTANCE.format(module=module, name=name)


def _functional(name: str) -> str:
    return REPLACED.format(home="torch.nn.functional", name=name)


def _class(names: str, name: str, wraps: str = "") -> str:
    return CLASS.format(names=names, name=name, wraps=wraps)


def _attribute(names: str, name: str, value: str) -> str:
    return ATTRIBUTE.format(names=names, name=name, value=value)


WRAPS = "@functools.wraps(original)"
SITES: dict[str, Site] = {
    "attention forward": Site(_instance("pick(unet, ATTENTION, seed)", "forward"), 20, 60),
    "block forward": Site(_instance("pick(unet, BLOCKS, seed)", "forward")),
    "model forward": Site(_instance("unet", "forward"), 1.1, 1.5, group="model"),
    "method": Site(_instance("pick(unet, INNER, seed)", "METHOD")),
    "class forward": Site(_class("BLOCKS", "forward"), 1.3, 2),
    "wrapped class forward": Site(_class("ATTENTION", "forward", WRAPS), 5, 20),
    "class method": Site(_class("INNER", "METHOD"), 1.3, 2),
    "wrapped class method": Site(_class("INNER", "METHOD", WRAPS), 1.3, 2),
    "group_norm": Site(_functional("group_norm"), 1.2, 2, group="group_norm"),
    "silu": Site(_functional("silu"), 1.2, 2, group="silu"),
    "gelu": Site(_functional("gelu"), group="gelu"),
    "interpolate": Site(_functional("interpolate"), group="interpolate"),
    "attention function": Site(_functional("scaled_dot_product_attention"), 5, 20, group="attention function"),
    "cat": Site(CAT, 1.5, 3, group="cat"),
    "convolution": Site(REPLACED.format(home="nn.Conv2d", name="_conv_forward"), 1.1, 1.4, group="convolution"),
    "hook": Site(HOOK, group=""),
    "pre-hook": Site(PRE_HOOK, group=""),
    "lasting hook": Site(LASTING_HOOK, keeps=IN_MODULE, group=""),
    "hook on all": Site(GLOBAL_HOOK, 1.3, 2, group=""),
    "pre-hook on all": Site(GLOBAL_PRE_HOOK, 1.3, 2, group=""),
    "eps": Site(_attribute("NORMS", "eps", "value"), 10, 40, OWN, group="eps"),
    "heads": Site(_attribute("ATTENTION", "heads", "1 + int(value) % 2"), 1, 20, OWN, group="heads"),
    # a sharper softmax would make more of rounding than of the patch
    "scale": Site(_attribute("ATTENTION", "scale", "original * value"), 1.5, 2.5, OWN, group="scale"),
    "output factor": Site(
        _attribute("ATTENTION", "rescale_output_factor", "1 / value"), 4, 20, OWN, ("sdnext",), "output factor"
    ),
    "layer exchanged": Site(LAYER, 4, 12, OWN, turns=False),
    "feed-forward exchanged": Site(WRAPPER, 4, 12),
    "processor": Site(PROCESSOR, 20, 60, hosts=("sdnext",)),
    "lasting processor": Site(LASTING_PROCESSOR, 20, 60, IN_MODULE, ("sdnext",)),
    "all processors": Site(ALL_PROCESSORS, 5, 20, OWN, ("sdnext",)),
    "counter": Site(COUNTER, keeps=OWN, group="", turns=False),
}


def kinds(host: str) -> list[str]:
    """The kinds of patch for a host."""
    return [kind for kind, site in SITES.items() if host in site.hosts]


def can_turn(kind: str, keep: str) -> bool:
    """Whether a patch's number can be changed while it is laid."""
    return SITES[kind].turns if keep == "own" else keep != "constant"


def each_step(kind: str, keep: str) -> bool:
    """Whether a patch is another at every step."""
    return keep == "step" or kind == "counter"


def source(kind: str, keep: str, host: str) -> str:
    """The text of a module."""
    code = SITES[kind].code
    if keep != "own":
        lines, amount = KEEPS[keep]
        code = code.replace("    KEEP\n", textwrap.indent(lines, "    ") + "\n").replace("AMOUNT", amount)
    for name, value in NAMES[host].items():
        code = code.replace(name, value)
    return PRELUDE + code
