"""Original layouts of the tensors whose memory or strides the weight arena changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

Strides = tuple[int, ...]
Layout = tuple[torch.Size, Strides]


class _Held:
    """A reference to a tensor, called like a weak one."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __call__(self) -> torch.Tensor:
        return self._tensor


class OriginalLayouts:
    """The strides that the host gave to tensors.

    Recorded for all memory that the arena allocated or changed, and for all tensors that it moved there, as long as
    others reference them: a host may keep some and put them back long after plans and weights are gone.

    Tensors are held by strong references, which `sweep` gives up. `torch.utils.swap_tensors`, as `Module.to` calls it,
    raises for a tensor with a weak reference.
    """

    def __init__(self) -> None:
        # the weak reference keeps the id of the storage from being reused
        self._memory: dict[int, tuple[StorageWeakRef, dict[tuple[int, Layout], Strides]]] = {}
        self._moved: dict[int, tuple[_Held, Layout, Strides]] = {}
        self._paths: dict[str, tuple[Layout, Strides]] = {}

    def record(self, tensor: torch.Tensor, original: Strides, paths: Iterable[str]) -> None:
        """The arena moved the tensor of these paths. Its original strides are `original`."""
        layout = _layout(tensor)
        self.record_memory(tensor, original)
        self._moved[id(tensor)] = (_Held(tensor), layout, original)
        self._paths.update((path, (layout, original)) for path in paths)

    def record_memory(self, tensor: torch.Tensor, original: Strides) -> None:
        """The memory of this tensor is the arena's. A tensor of the host's there has the strides `original`."""
        _, places = self._memory.setdefault(memory_of(tensor), (StorageWeakRef(tensor.untyped_storage()), {}))
        places[tensor.storage_offset(), _layout(tensor)] = original

    def strides_of(self, tensor: torch.Tensor, paths: Iterable[str] = ()) -> Strides | None:
        """The original strides of the tensor of these paths. None if the arena did not change them."""
        if not is_plain(tensor):
            return None
        memory = self._memory.get(memory_of(tensor))
        if memory is not None:
            # strides that the arena did not set are the host's choice
            return memory[1].get((tensor.storage_offset(), _layout(tensor)), tensor.stride())
        # strides propagate to what is computed from a tensor: its new data, or a tensor that replaces it
        moved = self._moved.get(id(tensor))
        laid = [self._paths[path] for path in paths if path in self._paths]
        if moved is None and not laid:
            return None
        layout = _layout(tensor)
        if moved is not None and moved[1] == layout:
            return moved[2]
        return next((original for given, original in laid if given == layout), None)

    def choose(self, tensor: torch.Tensor, paths: Iterable[str]) -> None:
        """The host chose the strides that the tensor of these paths has."""
        self._moved.pop(id(tensor), None)
        for path in paths:
            self._paths.pop(path, None)
        if memory_of(tensor) in self._memory:
            self.record(tensor, tensor.stride(), paths)

    def is_original(self, tensor: torch.Tensor, original: Strides) -> bool:
        """Whether a tensor has its original strides, in memory that is not the arena's."""
        return tensor.stride() == original and memory_of(tensor) not in self._memory

    def moved(self) -> list[torch.Tensor]:
        """The tensors that the arena moved and that still exist, in the module or elsewhere."""
        self.sweep()
        return [held() for held, _, _ in self._moved.values()]

    def restore(self, tensor: torch.Tensor, original: Strides) -> None:
        """Move a tensor to separate memory, with its original strides."""
        with torch.inference_mode(False), torch.no_grad():
            # of a weight that was expanded, what it was expanded from
            first = live_tensor(tensor)[tuple(slice(None if stride else 1) for stride in original)]
            own = torch.empty_strided(first.shape, original, dtype=tensor.dtype, device=tensor.device)
            set_data(tensor, own.copy_(first).expand(tensor.shape))
        self._moved.pop(id(tensor), None)

    def sweep(self, used: Container[int] = ()) -> None:
        """Forget tensors and memory that nobody else references.

        Args:
            used: ids of tensors that others reference for certain.
        """
        for key in [key for key in self._moved if key not in used]:
            # a tensor that survives the loss of this reference has others
            held, layout, original = self._moved.pop(key)
            reference = weakref.ref(held())
            del held
            if (tensor := reference()) is not None:
                self._moved[key] = (_Held(tensor), layout, original)
                del tensor
        self._memory = {key: known for key, known in self._memory.items() if not known[0].expired()}

    def give_up(self) -> None:
        """Hold no tensor any more: a host that is short of memory replaces one after the other. Paths are kept."""
        self._moved.clear()
        self.sweep()

    def release(self, tensor: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Drop the reference to a tensor. Returns a function that records the tensor again."""
        known = self._moved.pop(id(tensor), None)
        if known is None:
            return lambda again: None
        _, layout, original = known

        def record_again(again: torch.Tensor) -> None:
            self._moved[id(again)] = (_Held(again), layout, original)

        return record_again

    def forget(self) -> None:
        """Forget the layouts of paths, and of tensors with strides that the arena did not set: new tensors in the
        module, and new data of these, have the layout that the host chose."""
        self._paths.clear()
        for key, (held, (shape, strides), _) in list(self._moved.items()):
            tensor = held()
            if tensor.shape == shape and tensor.stride() != strides:
                del self._moved[key]


def is_channels_last(shape: Sequence[int], strides: Strides) -> bool:
    """Whether torch's convolutions take a weight for channels-last, and then return a result that is."""
    if len(shape) not in (4, 5):
        return False
    inner = [1, *range(len(shape) - 1, 1, -1), 0]
    least = 0
    for d in inner:
        if not shape[d] or strides[d] < least or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * max(shape[d], 1)
    return strides[1] != 0


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain one or a parameter, strided, and not wrapped by torch.func, as what
    `torch.func.functional_call` puts in the place of a weight may be: such a tensor has no memory that can be read."""
    strided = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return strided and torch._C._has_storage(tensor) and not torch._is_functional_tensor(tensor)


def reach(x: torch.Tensor) -> int:
    """The number of elements from the first of a tensor to its last, in memory."""
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride())) if x.numel() else 0


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """`tensor.data = data`. An inference tensor stays one, and a normal tensor stays normal.

    An inference tensor has no version counter. With the data of a normal tensor it would appear to have one, and taking
    a view of it would raise.
    """
    if tensor.is_inference() != data.is_inference():
        with torch.inference_mode(tensor.is_inference()):
            data = _view_without_base(data)
    tensor.data = data


def live_tensor(value: torch.Tensor) -> torch.Tensor:
    """A tensor on the memory of `value` that may be written in any mode."""
    value = value.detach()
    plain = type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized
    if not plain or _is_normal(value):
        return value
    with torch.inference_mode(False):
        return _view_without_base(value)


def _is_normal(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no inference tensor, and was none before a host gave it a normal tensor's data, as
    `Module.to` does outside of inference mode: such a one has no version counter, and views of it raise."""
    try:
        return not tensor.is_inference() and tensor._version >= 0
    except RuntimeError:
        return False


def _view_without_base(tensor: torch.Tensor) -> torch.Tensor:
    # the current mode decides whether a new tensor is an inference tensor; a view is what its base is
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    with torch.no_grad():
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def memory_of(tensor: torch.Tensor) -> int:
    """The id of a tensor's storage. Equal for tensors that share memory, while they exist."""
    return tensor.untyped_storage()._cdata


def _layout(tensor: torch.Tensor) -> Layout:
    return tensor.shape, tensor.stride()
