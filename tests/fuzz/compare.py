"""What belongs to two modules, piece by piece, down to strides and memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from sfast_ext.behaviour.forward_slot import AcceleratedForward
from sfast_ext.kernels.eight_bits import quantise_weights
from sfast_ext.plans.plan import Plan
from sfast_ext.weights.weight import places_of

SLOTS = ("forward", "_old_forward")


class Wrong(AssertionError):
    """The accelerated model and its twin differ."""


def compare_modules(ours: nn.Module, theirs: nn.Module, *, free_layouts: Collection[int] = ()) -> None:
    """Everything that a module holds; the strides of tensors of so many dimensions as in `free_layouts` excepted.

    Raises:
        Wrong: something is not alike; the message names it.
    """
    mine, others = dict(ours.named_modules()), dict(theirs.named_modules())
    if list(mine) != list(others):
        raise Wrong(f"other submodules: {set(mine) ^ set(others)}")
    for path, module in mine.items():
        twin = others[path]
        words = path or "the model"
        if type(module) is not type(twin):
            raise Wrong(f"{words} is a {type(module)}, not a {type(twin)}")
        if _attributes(module) != _attributes(twin):
            raise Wrong(f"{words} has other attributes: {_attributes(module) ^ _attributes(twin)}")
        for slot in SLOTS:
            if _stands_for(module, slot) != _stands_for(twin, slot):
                raise Wrong(f"{words}.{slot} is {_stands_for(module, slot)}, not {_stands_for(twin, slot)}")
        for name, value in twin.__dict__.items():
            _compare_attribute(f"{words}.{name}", module.__dict__.get(name), value)
        for name, value in held(twin):
            _compare_tensors(f"{words}.{name}", dict(held(module))[name], value, free_layouts)
    for name, grouped in (("tied", _tied), ("views of one memory", _in_one_memory)):
        if grouped(ours) != grouped(theirs):
            raise Wrong(f"other parameters are {name}")


def compare_banks(plans: Iterable[Plan], ours: nn.Module, theirs: nn.Module) -> int:
    """The weights that the plan used last has in 8 bits, with those of the twin. What is left of a change that was
    missed may be less than 8 bits lose anyway: so these are compared to the bit. Returns how many.

    Raises:
        Wrong: they are those of other values.
    """
    latest = next(reversed(list(plans)), None)
    found = [] if latest is None else latest.banks
    paths = {(id(container), name): path for path, (container, name) in places_of(ours).items()}
    there = places_of(theirs)
    for bank in found:
        wanted = []
        for weight in bank.weight.parts or (bank.weight,):
            container, name = weight.slots[0]
            held_by_twin, its_name = there[paths[id(container), name]]
            wanted.append(held_by_twin[its_name].detach())
        weight = torch.cat(wanted)
        if weight.dim() == 4:
            weight = weight.contiguous(memory_format=torch.channels_last)
        # by the same kernel: on a GPU it rounds some codes otherwise than its reference
        new = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in bank.tensors]
        quantise_weights.launch([weight], *([x] for x in new), [bank.group])
        if not all(map(torch.equal, new, bank.tensors)):
            raise Wrong(f"the 8-bit integers of {bank.weight.path} are stale")
    return len(found)


def held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one module, submodules apart: parameters, buffers and plain attributes."""
    for container in (module._parameters, module._buffers, module.__dict__):
        for name, value in container.items():
            if isinstance(value, torch.Tensor):
                yield name, value


def places(module: nn.Module) -> list[tuple[str, int]]:
    """Which object is where: submodules, parameters, buffers and tensor attributes."""
    found = []
    for path, each in module.named_modules():
        found.append((path, id(each)))
        found += [(f"{path}.{name}", id(value)) for name, value in held(each)]
    return found


def _attributes(module: nn.Module) -> set[str]:
    return {name for name in module.__dict__ if name not in SLOTS}


def _stands_for(module: nn.Module, slot: str) -> str | None:
    """What runs from a slot, in words that are the same for twins; None for the class's own forward."""
    function: Any = module.__dict__.get(slot)
    while isinstance(function, AcceleratedForward) and not function.owner.installed():
        # left where somebody's wrapper that held it put it back; it only passes calls on
        function = function.previous
    # accelerate leaves the class's own forward on an instance
    if function is None or getattr(function, "__func__", None) is type(module).forward:
        return None
    return _name(function)


def _name(function: Any) -> str:
    return f"{getattr(function, '__qualname__', None) or type(function).__qualname__}"


def _compare_attribute(path: str, ours: Any, theirs: Any) -> None:
    if isinstance(theirs, (bool, int, float, str)) and (type(ours) is not type(theirs) or ours != theirs):
        raise Wrong(f"{path} is {ours!r}, not {theirs!r}")
    if "hooks" in path.rpartition(".")[2] and isinstance(theirs, dict):
        # a hook's number is of the whole process
        mine, others = [_name(f) for f in ours.values()], [_name(f) for f in theirs.values()]
        if mine != others:
            raise Wrong(f"{path} has {mine}, not {others}")
    elif path.rpartition(".")[2] in ("_parameters", "_buffers", "_modules") and list(ours) != list(theirs):
        raise Wrong(f"{path} differs: {list(ours)}, not {list(theirs)}")


def _compare_tensors(path: str, ours: torch.Tensor, theirs: torch.Tensor, free_layouts: Collection[int]) -> None:
    if ours.shape != theirs.shape:
        raise Wrong(f"{path} is {list(ours.shape)}, not {list(theirs.shape)}")
    if theirs.dim() not in free_layouts and ours.stride() != theirs.stride():
        raise Wrong(f"{path} has strides {ours.stride()}, not {theirs.stride()}")
    for what in (type, torch.Tensor.storage_offset, _storage, _kind):
        if what(ours) != what(theirs):
            raise Wrong(f"{path} is {what(ours)}, not {what(theirs)}")
    if not torch.equal(ours, theirs):
        raise Wrong(f"{path} has other values")


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_inference()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _tied(model: nn.Module) -> list[list[str]]:
    return _groups((name, id(p)) for name, p in model.named_parameters(remove_duplicate=False))


def _in_one_memory(model: nn.Module) -> list[list[str]]:
    return _groups(
        (f"{path}.{name}", tensor.untyped_storage().data_ptr())
        for path, module in model.named_modules()
        for name, tensor in held(module)
    )


def _groups(named: Iterator[tuple[str, int]]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, key in named:
        groups.setdefault(key, []).append(name)
    return sorted(groups.values())
