"""What hosts and other extensions put on a model, and take off again."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn

from fuzz.nets import Attention, Block
from fuzz.world import Event, World

LAYERS = (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm)


class Scaled:
    """A processor with a strength, as an IP-Adapter's; `how` says where it is kept."""

    def __init__(self, inner: Any, scale: float, how: str) -> None:
        self.inner, self.how = inner, how
        self.set(scale)

    def set(self, scale: float) -> None:
        if self.how == "object" and hasattr(self, "scale"):
            self.scale.scale = scale
            return
        self.scale: Any = {
            "plain": scale, "list": [scale], "dict": {"scale": scale}, "object": SimpleNamespace(scale=scale),
            "tensor": torch.tensor(scale),
        }[self.how]  # fmt: skip

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        scale = self.scale
        if self.how in ("list", "dict"):
            scale = scale[0 if self.how == "list" else "scale"]
        return self.inner(*args, **kwargs) * (scale.scale if self.how == "object" else scale)


class LoraLinear(nn.Module):
    """A layer of PEFT's kind: it takes the place of the one it adds to."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        self.base_layer = base
        generator = torch.Generator().manual_seed(seed)
        shape = (base.out_features, base.in_features)
        self.weight_b = nn.Parameter(0.1 * torch.randn(shape, generator=generator).to(base.weight))
        self.weight_b.requires_grad_(base.weight.requires_grad)
        self.scaling = 1.0

    def forward(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return self.base_layer(x) + nn.functional.linear(x, self.weight_b) * self.scaling


def toggle(w: World, name: str, put_on: Callable[[], Callable[[], None]], *, foreign: bool = False) -> None:
    """Put a patch on, or take it off if it is on."""
    if name in w.patches:
        w.patches.pop(name)()
        w.foreign.discard(name)
    else:
        w.patches[name] = put_on()
        if foreign:
            w.foreign.add(name)
    w.behaves_otherwise()


def both(w: World, put_on: Callable[[nn.Module], Callable[[], None]]) -> Callable[[], None]:
    undo: list[Callable[[], None]] = []
    w.both(lambda m: undo.append(put_on(m)))
    return lambda: [u() for u in undo] and None


def instance_forward(w: World, rng: random.Random) -> None:
    path, factor, vouched = w.pick(rng, LAYERS), rng.uniform(0.8, 1.2), rng.random() < 0.4
    by_assignment = rng.random() < 0.5

    def put_on(m: nn.Module) -> Callable[[], None]:
        module = m.get_submodule(path)
        before = module.forward

        def patched(*args: Any, **kwargs: Any) -> Any:
            return before(*args, **kwargs) * factor

        patched.vouched = vouched  # type: ignore[attr-defined]
        module.forward = patched  # type: ignore[method-assign]

        def undo() -> None:
            if by_assignment:
                # as many do who kept what they found
                module.forward = before  # type: ignore[method-assign]
            else:
                del module.forward

        return undo

    if not any(name.startswith("accelerate inside") for name in w.patches):
        toggle(w, "instance forward", lambda: both(w, put_on), foreign=not vouched)


def class_forward(w: World, rng: random.Random) -> None:
    """A class of the model's own, or one of torch's, patched for all, by its own package or by anybody's code; and
    what that keeps in its closure changed."""
    cls: Any = rng.choice((Attention, Block, nn.GroupNorm, nn.Linear))
    factor, whose, late = rng.uniform(0.8, 1.2), rng.choice(("own", "another's", "vouched")), rng.random() < 0.4
    if cls is Attention and "class forward" not in w.patches and "attention" in w.patches:
        # which is a forward of this class, and takes away what is laid over it when it goes
        return
    if "class forward" in w.patches and late:
        # what a host vouches for is known to its adapter: this one lets nothing change
        w.closure["factor"] = w.closure["factor"] if w.closure["vouched"] else factor
        w.behaves_otherwise()
        return
    state = {"factor": factor, "vouched": whose == "vouched"}
    # torch's classes know nobody of this package
    foreign = whose == "another's" or (whose == "own" and not cls.__module__.startswith("fuzz"))

    def put_on() -> Callable[[], None]:
        before = cls.forward

        def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
            return before(self, *args, **kwargs) * state["factor"]

        patched = functools.wraps(before)(patched if whose == "own" else written_elsewhere(patched))
        patched.vouched = state["vouched"]
        cls.forward, w.closure = patched, state

        def undo() -> None:
            cls.forward = before

        return undo

    toggle(w, "class forward", put_on, foreign=foreign)


def written_elsewhere(function: Any) -> Any:
    """The same function as if its code were a script's."""
    scope = {**function.__globals__, "__name__": "a_script"}
    code = function.__code__.replace(co_filename="/webui/scripts/a_script.py")
    return FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)


def root_class(w: World, rng: random.Random) -> None:
    cls: Any = type(w.twin)
    factor = rng.uniform(0.8, 1.2)

    def put_on() -> Callable[[], None]:
        before = cls.forward

        @functools.wraps(before)
        def patched(self: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
            return before(self, sample * factor, *args, **kwargs)

        cls.forward = patched

        def undo() -> None:
            cls.forward = before

        return undo

    # what others put over the forward, or left there, holds the class's forward as it was then; ours does not
    if "root class" in w.patches or "forward" not in w.twin.__dict__:
        # a class of another package knows nobody of this one
        toggle(w, "root class", put_on, foreign=not cls.__module__.startswith("fuzz"))


def root_wrapped(w: World, rng: random.Random) -> None:
    """Somebody wraps the model's forward after us, as many extensions do."""
    factor = rng.uniform(0.8, 1.2)

    def put_on(m: nn.Module) -> Callable[[], None]:
        before = m.forward

        def wrapper(sample: Any, *args: Any, **kwargs: Any) -> Any:
            return before(sample * factor, *args, **kwargs)

        m.forward = wrapper  # type: ignore[method-assign]

        def undo() -> None:
            m.forward = before  # type: ignore[method-assign]

        return undo

    if not {"accelerate outside", "root class"} & set(w.patches):
        toggle(w, "root wrapped", lambda: both(w, put_on))


def _hook(w: World, name: str, path: str, factor: float, *, pre: bool, vouched: bool) -> None:
    def put_on(m: nn.Module) -> Callable[[], None]:
        if pre:
            function: Any = lambda module, args: (args[0] * factor, *args[1:]) if args else None
        else:
            function = lambda module, args, result: result * factor if torch.is_tensor(result) else None
        function.vouched = vouched
        module = m.get_submodule(path)
        register = module.register_forward_pre_hook if pre else module.register_forward_hook
        return register(function).remove

    toggle(w, name, lambda: both(w, put_on), foreign=bool(path) and not vouched)


def hook(w: World, rng: random.Random) -> None:
    _hook(w, "hook", w.pick(rng, LAYERS), rng.uniform(0.8, 1.2), pre=rng.random() < 0.5, vouched=rng.random() < 0.4)


def root_hook(w: World, rng: random.Random) -> None:
    _hook(w, "root hook", "", rng.uniform(0.8, 1.2), pre=True, vouched=False)


def scalar(w: World, rng: random.Random) -> None:
    """FreeU's way: numbers on the modules."""
    name, value = rng.choice(("s1", "b1")), rng.choice((1.0, 0.9, 1.2, 1.4))
    if w.kind == "unet":
        w.both(lambda m: m.disable_freeu() if value == 1.0 else m.enable_freeu(s1=value, s2=0.2, b1=1.1, b2=value))
    else:
        w.both(lambda m: setattr(m, name, value))
    w.behaves_otherwise()


def attribute(w: World, rng: random.Random) -> None:
    """A number that a layer has."""
    path, eps = w.pick(rng, (nn.GroupNorm, nn.LayerNorm)), rng.choice((1e-5, 0.1, 0.5))
    w.both(lambda m: setattr(m.get_submodule(path), "eps", eps))
    w.behaves_otherwise()


def processor(w: World, rng: random.Random) -> None:
    """Other attention processors, on and off, and other strengths of the ones that are on."""
    value, how = rng.uniform(0.5, 1.5), rng.choice(("plain", "list", "dict", "object", "tensor"))
    on = [n for n, m in w.twin.named_modules() if isinstance(getattr(m, "processor", None), Scaled)]
    if on and rng.random() < 0.7:
        w.both(lambda m: [m.get_submodule(n).processor.set(value) for n in on])
        w.behaves_otherwise()
        return
    path = rng.choice([n for n, m in w.twin.named_modules() if hasattr(m, "processor")])

    def put_on(m: nn.Module) -> Callable[[], None]:
        module: Any = m.get_submodule(path)
        before = module.processor
        module.processor = Scaled(before, value, how)

        def undo() -> None:
            module.processor = before

        return undo

    toggle(w, "processor", lambda: both(w, put_on), foreign=how == "tensor")


def submodule_replaced(w: World, rng: random.Random) -> None:
    path = w.pick(rng, LAYERS)

    def change(m: nn.Module) -> None:
        home, _, name = path.rpartition(".")
        # of the twin for both: a copy has the strides that it was copied with
        fresh = copy.deepcopy(w.twin.get_submodule(path))
        for p in fresh.parameters():
            p.mul_(0.9)
        setattr(m.get_submodule(home), name, fresh)

    # a forward laid over the layer would be copied with it, and go on to the layer that was left
    if not w.foreign and "instance forward" not in w.patches:
        w.both(change)
        w.behaves_otherwise()


def lora_layer(w: World, rng: random.Random) -> None:
    """PEFT's way: a layer takes the place of another, with a strength of its own."""
    seed, scale = rng.getrandbits(32), rng.uniform(0.2, 1.0)
    on = [n for n, m in w.twin.named_modules() if type(m) is LoraLinear]
    if on and rng.random() < 0.5:
        w.both(lambda m: [setattr(m.get_submodule(n), "scaling", scale) for n in on])
        w.behaves_otherwise()
        return
    path = on[0] if on else w.pick(rng, nn.Linear)

    def change(m: nn.Module) -> None:
        home, _, name = path.rpartition(".")
        layer = m.get_submodule(path)
        base = layer.base_layer if isinstance(layer, LoraLinear) else LoraLinear(layer, seed)  # type: ignore[arg-type]
        setattr(m.get_submodule(home), name, base)

    # what others hold of the layer would be left on the wrong module
    if not w.foreign:
        w.both(change)
        w.behaves_otherwise()


def bias(w: World, rng: random.Random) -> None:
    path, value = w.pick(rng, (nn.Linear, nn.Conv2d)), rng.uniform(-0.3, 0.3)

    def change(m: nn.Module) -> None:
        layer: Any = m.get_submodule(path)
        if layer.bias is not None:
            layer.bias = None
        else:
            fresh = layer.weight.new_full((layer.weight.shape[0],), value)
            layer.bias = nn.Parameter(fresh, requires_grad=layer.weight.requires_grad)

    w.both(change)
    w.behaves_otherwise()


def training(w: World, rng: random.Random) -> None:
    path, mode = w.pick(rng, LAYERS), rng.random() < 0.5
    w.both(lambda m: m.get_submodule(path).train(mode))
    w.behaves_otherwise()


class _Counting(ModelHook):
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def _accelerates_hook(w: World, name: str, path: str) -> None:
    def put_on(m: nn.Module) -> Callable[[], None]:
        module = m.get_submodule(path)
        add_hook_to_module(module, _Counting())
        return lambda: remove_hook_from_module(module) and None

    toggle(w, name, lambda: both(w, put_on), foreign=bool(path))


def accelerates_hook_outside(w: World, rng: random.Random) -> None:
    if not {"root wrapped", "root class"} & set(w.patches):
        _accelerates_hook(w, "accelerate outside", "")


def accelerates_hook_inside(w: World, rng: random.Random) -> None:
    if "instance forward" not in w.patches:
        _accelerates_hook(w, "accelerate inside", w.pick(rng, LAYERS))


EVENTS: dict[Event, int] = {
    instance_forward: 2, class_forward: 2, root_class: 1, root_wrapped: 2, hook: 2, root_hook: 2, scalar: 2,
    attribute: 3, processor: 3, submodule_replaced: 1, lora_layer: 1, bias: 2, training: 1, accelerates_hook_outside: 2,
    accelerates_hook_inside: 1,
}  # fmt: skip
