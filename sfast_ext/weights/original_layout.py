"""How the host knows the tensors that the weight arena laid elsewhere or otherwise."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

Strides = tuple[int, ...]
Layout = tuple[torch.Size, Strides]


class OriginalLayouts:
    """The strides that the host knows tensors by.

    Known for all memory that the arena made or laid out and for all tensors that it moved there, as long as anybody
    has them: a host may keep some, and put them back when plans and weights are long forgotten.
    """

    def __init__(self) -> None:
        # a weak reference keeps the number of the memory from being given to another
        self._memory: dict[int, tuple[StorageWeakRef, dict[tuple[int, Layout], Strides]]] = {}
        self._moved: dict[int, tuple[weakref.ref[torch.Tensor], Layout, Strides]] = {}
        self._paths: dict[str, tuple[Layout, Strides]] = {}

    def record(self, tensor: torch.Tensor, original: Strides, paths: Iterable[str]) -> None:
        """The tensor of these paths lies as the arena wants it now; its host knows it by the strides `original`."""
        layout = _layout(tensor)
        self.record_memory(tensor, original)
        self._moved[id(tensor)] = (weakref.ref(tensor), layout, original)
        self._paths.update((path, (layout, original)) for path in paths)

    def record_memory(self, tensor: torch.Tensor, original: Strides) -> None:
        """The memory of this tensor is the arena's, which the host knows by the strides `original` when it gets it."""
        _, places = self._memory.setdefault(memory_of(tensor), (StorageWeakRef(tensor.untyped_storage()), {}))
        places[tensor.storage_offset(), _layout(tensor)] = original

    def strides_of(self, tensor: torch.Tensor, paths: Iterable[str] = ()) -> Strides | None:
        """The strides that the host knows the tensor of these paths by; None where the arena has no part in it."""
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return None
        layout = _layout(tensor)
        memory = self._memory.get(memory_of(tensor))
        if memory is not None:
            # strides that the arena did not give it are the host's choice
            return memory[1].get((tensor.storage_offset(), layout), tensor.stride())
        # strides go on to what is computed from a tensor: to its new data, and to what takes its place
        reference, moved, original = self._moved.get(id(tensor), (None, None, None))
        if reference is not None and reference() is tensor and moved == layout:
            return original
        laid = [self._paths[path] for path in paths if path in self._paths]
        return next((original for given, original in laid if given == layout), None)

    def is_original(self, tensor: torch.Tensor, original: Strides) -> bool:
        """Whether a tensor has these strides, in memory that is not the arena's."""
        return tensor.stride() == original and memory_of(tensor) not in self._memory

    def moved(self) -> list[torch.Tensor]:
        """The tensors that the arena moved and that somebody has still, in the module or not."""
        return [tensor for reference, _, _ in self._moved.values() if (tensor := reference()) is not None]

    def restore(self, tensor: torch.Tensor, original: Strides) -> None:
        """Lay a tensor out with these strides, in memory of its own."""
        with torch.inference_mode(False), torch.no_grad():
            own = torch.empty_strided(tensor.shape, original, dtype=tensor.dtype, device=tensor.device)
            own.copy_(tensor.detach())
            set_data(tensor, own)
        self._moved.pop(id(tensor), None)

    def sweep(self) -> None:
        """Forget what nobody has any more."""
        self._memory = {key: known for key, known in self._memory.items() if not known[0].expired()}
        self._moved = {key: known for key, known in self._moved.items() if known[0]() is not None}

    def forget(self) -> None:
        """Whatever lies in the module's places from now on is the host's choice."""
        self._paths.clear()


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """`tensor.data = data`, by which `tensor` stays the inference tensor that it is, or stays none.

    One that was made under `torch.inference_mode` has no version counter. With the data of a tensor that has one it
    passes for a tensor with a counter, and whatever takes a view of it raises.
    """
    if tensor.is_inference() != data.is_inference():
        with torch.inference_mode(tensor.is_inference()):
            data = _view_without_base(data)
    tensor.data = data


def live_tensor(value: torch.Tensor) -> torch.Tensor:
    """A tensor over the memory of `value` that may be written to in any mode."""
    value = value.detach()
    plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
    if not plain or not value.is_inference():
        return value
    with torch.inference_mode(False):
        return _view_without_base(value)


def _view_without_base(tensor: torch.Tensor) -> torch.Tensor:
    # whether it is an inference tensor is decided by the mode in which it is made; a view would be what its base is
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def memory_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, while they live."""
    return tensor.untyped_storage()._cdata


def _layout(tensor: torch.Tensor) -> Layout:
    return tensor.shape, tensor.stride()
