"""Copies in system memory of weights that are on the GPU.

A host that has little GPU memory moves each model there and back for each image. The way back copies all weights,
although the host's own tensors in system memory had the same values. They are kept here while the model is on the GPU,
and put back if a digest of the weight (see `digest`) shows that nothing changed it. They take no more system memory
than the host needs while the model is away.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from sfast_ext.weights.digest import Digests
from sfast_ext.weights.external_refs import ALONE, uses
from sfast_ext.weights.module_walk import modules_of, parameters_in, parameters_of
from sfast_ext.weights.original_layout import is_plain, live_tensor, set_data
from sfast_ext.weights.staging import Staging, is_dense

Sources = list[tuple[nn.Parameter, torch.Tensor]]
"""Parameters, and what they had in system memory."""


@dataclass
class _Kept:
    parameters: list[int]
    """By id: `torch.utils.swap_tensors` raises for a tensor with a weak reference. Another tensor may have the id of a
    parameter that is gone; it is put back only if it is equal."""
    sources: list[torch.Tensor]
    digests: Digests


class HostCopies:
    """Those of modules that a host moves. Only parameters are followed, not buffers."""

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()
        _everywhere.add(self)

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._kept

    @property
    def bytes(self) -> int:
        """What they take in system memory."""
        return sum(source.nbytes for kept in self._kept.values() for source in kept.sources)

    def keep(self, module: nn.Module, sources: Sources) -> None:
        """Keep the copies of a module that was moved to the GPU.

        Args:
            sources: what `sources_of` gave before it was moved. A tensor whose memory is used by others as well is not
                kept: they may write to it, or rely on being the only ones. Without any, those before stay.
        """
        if not sources:
            return
        self._kept.pop(module, None)
        followed = [
            (parameter, source)
            for parameter, source in sources
            if _followed(parameter, source) and uses(source) == ALONE
        ]
        if followed:
            with _readable():
                digests = Digests([live_tensor(parameter) for parameter, _ in followed])
            self._kept[module] = _Kept([id(p) for p, _ in followed], [s for _, s in followed], digests)

    def put_back(self, module: nn.Module, modules: Iterable[nn.Module] | None = None) -> int:
        """Give the parameters of a module that is about to leave the GPU their copies in system memory, where these are
        still equal. Returns how many need not be copied.

        Args:
            modules: the module and what is in it, if that is known.
        """
        kept = self._kept.pop(module, None)
        if kept is None:
            return 0
        held = parameters_in(modules_of(module) if modules is None else modules)
        present = {id(parameter): parameter for parameter in held}
        places = zip((present.get(key) for key in kept.parameters), kept.sources)
        parameters = [p if p is not None and _followed(p, source) else None for p, source in places]
        for device in {p.device for p in parameters if p is not None}:
            # what another stream writes to them
            torch.cuda.synchronize(device)
        with _readable():
            unchanged = kept.digests.unchanged([None if p is None else live_tensor(p) for p in parameters])
        found = [(p, s) for p, s, is_same in zip(parameters, kept.sources, unchanged) if p is not None and is_same]
        for parameter, source in found:
            set_data(parameter, source)
        return len(found)

    def put_back_some(self, wanted: Container[int]) -> None:
        """`put_back` for the parameters with these ids. The copies of others stay."""
        for module, kept in list(self._kept.items()):
            if any(key in wanted for key in kept.parameters):
                chosen = [key in wanted for key in kept.parameters]
                rest = [(-1, source[:0]) if taken else pair for taken, source, pair in zip(
                    chosen, kept.sources, zip(kept.parameters, kept.sources))]  # fmt: skip
                kept.parameters = [key if taken else -1 for taken, key in zip(chosen, kept.parameters)]
                self.put_back(module)
                if any(key != -1 for key, _ in rest):
                    kept.parameters, kept.sources = [key for key, _ in rest], [source for _, source in rest]
                    self._kept[module] = kept

    def drop(self) -> None:
        """Free all copies."""
        self._kept.clear()

    def sweep(self) -> None:
        """Free the copies of modules that were moved in a way that was not followed."""
        for module in [module for module in self._kept if not any(p.is_cuda for p in parameters_of(module))]:
            del self._kept[module]


_everywhere: weakref.WeakSet[HostCopies] = weakref.WeakSet()


def put_back_everywhere(parameters: Iterable[torch.Tensor]) -> None:
    """Give parameters that are about to leave the GPU their copies in system memory, whoever keeps them. A GPU that is
    full may have no memory for digests: then they stay without."""
    wanted = set(map(id, parameters))
    for copies in list(_everywhere):
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            copies.put_back_some(wanted)


def sources_of(parameters: Iterable[nn.Parameter]) -> Sources:
    """What parameters of a module have in system memory, before it is moved. It is not freed while this is held."""
    here = (p for p in parameters if p.device.type == "cpu" and is_plain(p) and p.numel())
    with torch.no_grad():
        return [(p, live_tensor(p)) for p in here]


def move_to_gpu(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Move the parameters of a module that are in system memory, as `module.to(device)` does, but faster; see
    `Staging`. All of them, or none if it fails."""
    moved: Sources = []
    with _readable():
        with Staging() as copy:
            for parameter, source in sources_of(parameters):
                there = torch.empty_like(source, device=device)
                copy(there, source)
                moved.append((parameter, there))
        for parameter, there in moved:
            set_data(parameter, there)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """Within, `live_tensor` gives what torch 2.1 can view as another dtype."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _followed(parameter: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a parameter is on the GPU and may have the values of `source`."""
    alike = is_plain(parameter) and parameter.dtype == source.dtype and parameter.shape == source.shape
    return alike and parameter.is_cuda and is_dense(parameter)
