"""The modules and parameters within a module, as `nn.Module` has them.

torch's `modules` and `parameters` are generators within generators, one for each level of the tree, and take twice as
long. A host that moves a model for each image has it walked several times.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def modules_of(root: nn.Module) -> list[nn.Module]:
    """What `root.modules()` gives, in its order."""
    found: list[nn.Module] = []
    seen: set[int] = set()
    left: list[nn.Module | None] = [root]
    while left:
        module = left.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            found.append(module)
            if children := module._modules:
                left += [*children.values()][::-1]
    return found


def parameters_of(root: nn.Module) -> list[nn.Parameter]:
    """What `root.parameters()` gives, in its order."""
    return parameters_in(modules_of(root))


def parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters that these modules hold themselves, each once."""
    found: dict[int, nn.Parameter] = {}
    for module in modules:
        for value in module._parameters.values() if module._parameters else ():
            if value is not None:
                found.setdefault(id(value), value)
    return list(found.values())
