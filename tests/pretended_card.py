"""A GPU that is only pretended: a second device, on which tensors have storage of their own and of which there is only
so much.

Its memory is the CPU's, told apart by storage: a tensor is on `cuda:0` if its storage is one of the card's, and gets
there by a copy, as to a real device. Operations between the two devices raise, allocations over the capacity raise
`torch.cuda.OutOfMemoryError`, and a graph reads and writes at the addresses it was captured with.

Torch without CUDA cannot make fake tensors on `cuda:0`: a capture is made for the CPU, and its constants and the
tensors that its graph creates are put on the card.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faulty import PretendedGraph, stand_in_for_cuda
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from sfast_ext import torch_state
from sfast_ext.behaviour import surroundings
from sfast_ext.hosts import gpu_room
from sfast_ext.kernels.attention.operands import Operands
from sfast_ext.kernels.backend.registry import Kernel
from sfast_ext.kernels.eight_bits import quantise_rows
from sfast_ext.passes import eight_bits_selection
from sfast_ext.plans import plan
from sfast_ext.runtime import lean_calls, plan_builder, plan_cache, plan_maker
from sfast_ext.weights import host_order, pinned_buffers
from sfast_ext.weights.staging import Staging

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
PLAIN = (torch.Tensor, torch.nn.Parameter)
NUMBERS = frozenset({int, float, bool, type(None)})
BUFFER_BYTES = 1 << 18
# between devices; a CPU's index may read from a GPU's tensor
CROSSING = frozenset({"_has_compatible_shallow_copy_type", "copy_", "_to_copy", "_foreach_copy_", "index", "set_"})

_VIEWS = ("alias", "as_strided", "detach", "expand", "permute", "t", "unsqueeze", "view")
VIEWS = frozenset(getattr(torch.ops.aten, name).default for name in _VIEWS)
"""Of one tensor, and in its memory: most of what is called, and nothing to count."""

# torch before 2.2 calls it so
_device = getattr(torch._C, "TensorBase", getattr(torch._C, "_TensorBase", None)).device.__get__
_gone = torch.UntypedStorage._expired  # whether the storage of a weak reference is freed
_to = torch.Tensor.to
_tensor = torch.tensor


class Card(TorchDispatchMode):
    """Memory of `capacity` bytes, of which others than torch have `outside`.

    `peak` is the most that was allocated at a time, by tensors and by graphs; `refused` counts allocations that raised;
    `faults` names the tensors that a graph would have read after their memory was freed.
    """

    def __init__(self, capacity: int, outside: int = 0) -> None:
        super().__init__()
        self.capacity, self.outside = capacity, outside
        self.peak = self.refused = 0
        self.faults: list[str] = []
        self.recording: CardGraph | None = None
        self.graph_bytes = 0
        # in a capture tensors are seen as they are; in a plan's graph "cpu" means the card
        self.blind = self.in_plan = self.moving = False
        # a weak reference keeps the address of a storage from being given to another
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing here is compiled, and to tell torch.compile so takes as long as the rest
        return False

    @property
    def allocated(self) -> int:
        """Bytes of the tensors there are."""
        storages = self._storages
        for key in [key for key, (there, _) in storages.items() if _gone(there.cdata)]:
            self._bytes -= storages.pop(key)[1]
        return self._bytes

    @property
    def used(self) -> int:
        """Bytes of tensors and of graphs."""
        return self.allocated + self.graph_bytes

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this device."""
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided or _device(tensor).type != "cpu":
            return False
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return known is not None and not _gone(known[0].cdata)

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        return GPU if not self.blind and self.holds(tensor) else _device(tensor)

    def to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`Tensor.to`, which would see a single device."""
        if type(tensor) not in PLAIN:
            if self.blind and args and isinstance(args[0], (str, torch.device)):
                # to where a fake tensor is already
                args = (tensor.device, *args[1:])
            return _to(tensor, *args, **kwargs)
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        if args and isinstance(args[0], int):
            args = (torch.device("cuda", args[0]), *args[1:])
        copy = kwargs.pop("copy", False)
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        dtype = dtype or tensor.dtype
        if device is None or device.type == self.device_of(tensor).type:
            form = {} if layout is None else {"memory_format": layout}
            return _to(tensor, dtype, copy=copy, **form)
        was, self.moving = self.moving, True
        try:
            return torch.ops.aten._to_copy.default(tensor, dtype=dtype, device=device, memory_format=layout)
        finally:
            self.moving = was

    def padded(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """`pad_sequence`, which fills a tensor of the device that torch's own code sees."""

        def pad(sequences: Any, *args: Any) -> torch.Tensor:
            found = function(sequences, *args)
            return found.to(sequences[0].device) if type(found) is torch.Tensor else found

        return pad

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recording is None and func in VIEWS:
            return func(*args, **(kwargs or {}))
        given: list[torch.Tensor] = []
        _collect(args, given)
        if kwargs:
            _collect(kwargs.values(), given)
        else:
            kwargs = {}
        storages = self._storages
        known, held = [], []
        for x in given:
            if type(x) not in PLAIN or _device(x).type != "cpu":
                return func(*args, **kwargs)
            key = x.untyped_storage()._cdata
            known.append(key)
            held.append(key in storages and x.layout is torch.strided and not _gone(storages[key][0].cdata))
        here = True in held
        mixed = here and False in held and any(x.dim() and not hold for x, hold in zip(given, held))
        if mixed and func.overloadpacket.__name__ not in CROSSING:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two in {func}")
        wanted = kwargs.get("device")
        if wanted is None or func is torch.ops.aten._to_copy.default and not self.moving and not self.in_plan:
            # torch's own code (`type_as`, `rms_norm`) names the device that it sees
            ours = here
        else:
            wanted = torch.device(wanted)
            if wanted.type not in ("cpu", "cuda"):
                return func(*args, **kwargs)
            ours = wanted.type == "cuda" or self.in_plan
            kwargs = {**kwargs, "device": CPU}
        result = func(*args, **kwargs)
        # while a plan is made, weights in system memory are read as well
        if ours and not (self.in_plan and func.overloadpacket is torch.ops.aten.set_):
            for x in _tensors(result):
                storage = x.untyped_storage()
                if storage._cdata not in known:
                    self._allocate(storage)
        if self.recording is not None:
            self.recording.note(func, args, kwargs, result)
        return result

    def _allocate(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        key = storage._cdata
        before = self._storages.get(key)
        if before is not None:
            if not _gone(before[0].cdata):
                return
            self._bytes -= before[1]
        self._storages[key] = StorageWeakRef(storage), size
        self._bytes += size
        if self._bytes + self.graph_bytes <= min(self.peak, self.capacity - self.outside):
            return
        used = self.used
        if used + self.outside > self.capacity:
            del self._storages[key]
            self._bytes -= size
            self.refused += 1
            raise torch.cuda.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes, {used - size} of {self.capacity} are in use"
            )
        self.peak = max(self.peak, used)


class _Address:
    """Where a graph reads a tensor that it did not make."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage, self._pointer = StorageWeakRef(storage), storage.data_ptr()
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._dtype = tensor.dtype

    def tensor(self, card: Card) -> torch.Tensor:
        """What lies there now.

        Raises:
            RuntimeError: it was freed; the card notes it as well, as callers may catch this.
        """
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None or storage.data_ptr() != self._pointer:
            card.faults.append(f"{self._dtype} {list(self._layout[1])}")
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)


class _Made:
    """A tensor that a graph makes, by its number."""

    def __init__(self, number: int) -> None:
        self.number = number


class CardGraph(PretendedGraph):
    """Stands in for torch.cuda.CUDAGraph: notes each operation, and runs them again on the same addresses."""

    card: Card

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__(keep_graph)
        # an operation; its arguments, and which of them are tensors, if none is in a list; what it makes
        self._steps: list[tuple[Any, list[Any], Any, list[tuple[int, Any]] | None, list[_Made | None]]] = []
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], _Made]] = {}
        self._outputs: list[tuple[weakref.ref[torch.Tensor], int]] = []
        self._held = self._before = 0
        # a graph may outlive the test that its card is of
        self.card = self.card

    def capture_begin(self, **options: Any) -> None:
        super().capture_begin(**options)
        self.card.recording = self
        self._before, self.card.peak = self.card.peak, self.card.used

    def capture_end(self) -> None:
        super().capture_end()
        card = self.card
        card.recording = None
        # as much as was alive at once; what is handed out is a tensor, and counted as one
        self._held = card.peak - card.used
        card.graph_bytes += self._held
        card.peak = max(card.peak, self._before)
        self._outputs = [(there, made.number) for there, made in self._made.values() if there() is not None]
        self._made = {}

    def __del__(self) -> None:
        self.card.graph_bytes -= self._held

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Called for each operation of a capture."""
        given = {id(x) for x in _tensors((args, kwargs))}
        made: list[_Made | None] = []
        args, kwargs = _mapped(self._reference, (args, kwargs))
        for x in _tensors(result):
            if id(x) in given:
                # written to in place
                made.append(None)
                continue
            number = _Made(len(self._steps) << 8 | len(made))
            self._made[id(x)] = weakref.ref(x), number
            made.append(number)
        places = [i for i, x in enumerate(args) if isinstance(x, (_Made, _Address))]
        nested = any(isinstance(x, (list, tuple, dict)) and _refers((x,)) for x in args) or _refers(kwargs.values())
        self._steps.append((func, list(args), kwargs, None if nested else [(i, args[i]) for i in places], made))

    def replay(self) -> None:
        card = self.card
        values: dict[int, torch.Tensor] = {}

        def there(x: Any) -> Any:
            if type(x) is _Made:
                return values[x.number]
            return x.tensor(card) if type(x) is _Address else x

        assert self._steps and PretendedGraph.capturing is None
        # what a graph computes lies in its own memory: nothing is allocated
        with torch._C._DisableTorchDispatch():
            for func, args, kwargs, places, made in self._steps:
                if places is None:
                    args, kwargs = _mapped(there, (args, kwargs))
                else:
                    for i, x in places:
                        args[i] = there(x)
                result = func._op(*args, **kwargs)
                for x, known in zip((result,) if isinstance(result, torch.Tensor) else _tensors(result), made):
                    if known is not None:
                        values[known.number] = x
                for i, _ in places or ():
                    # it would keep their memory
                    args[i] = None
            for output, number in self._outputs:
                tensor = output()
                if tensor is not None:
                    tensor.copy_(values[number])

    def _reference(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if not x.dim() and not self.card.holds(x):
            # a number, which a launch takes by value
            return x.clone()
        there, made = self._made.get(id(x), (None, None))
        return made if there is not None and there() is x else _Address(x)


class _Launch:
    """A kernel on the card, where it is one operation: what its reference allocates meanwhile is not the card's."""

    def __init__(self, card: Card, kernel: Kernel[..., Any]) -> None:
        self._card, self._kernel = card, kernel

    def _op(self, *args: Any, **kwargs: Any) -> Any:
        was, self._card.blind = self._card.blind, True
        try:
            return _launch(self._kernel, *args, **kwargs)
        finally:
            self._card.blind = was

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        card, given = self._card, _tensors((args, kwargs))
        if card.blind or not card.in_plan or not given or not all(card.holds(x) for x in given):
            return _launch(self._kernel, *args, **kwargs)
        known = {x.untyped_storage()._cdata for x in given}
        with torch._C._DisableTorchDispatch():
            result = self._op(*args, **kwargs)
        for x in _tensors(result):
            if x.untyped_storage()._cdata not in known:
                card._allocate(x.untyped_storage())
        if card.recording is not None:
            card.recording.note(self, args, kwargs, result)
        return result


_launch = Kernel.__call__


# torch's own functions for trees take a third of the time of a test


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: list[torch.Tensor] = []
    _collect((tree,), found)
    return found


def _collect(leaves: Any, found: list[torch.Tensor]) -> None:
    for each in leaves:
        if type(each) in NUMBERS:
            continue
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            # sizes and strides are most of what there is
            if each and type(each[0]) is not int:
                _collect(each, found)
        elif isinstance(each, dict):
            _collect(each.values(), found)


def _refers(leaves: Any) -> bool:
    """Whether a tensor that a graph reads is among the leaves."""
    for each in leaves:
        if isinstance(each, (_Made, _Address)):
            return True
        if isinstance(each, (list, tuple)) and _refers(each) or isinstance(each, dict) and _refers(each.values()):
            return True
    return False


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with `function` of each leaf."""
    if isinstance(tree, (list, tuple)):
        return type(tree)([_mapped(function, each) for each in tree])
    if isinstance(tree, dict):
        return {key: _mapped(function, each) for key, each in tree.items()}
    return function(tree)


@contextlib.contextmanager
def pretended_card(patch: pytest.MonkeyPatch, capacity: int, outside: int = 0) -> Iterator[Card]:
    """A GPU of `capacity` bytes in this thread."""
    # torch notes for good, the first time that a device is a context, which functions make tensors: its own
    with torch.device(CPU):
        torch.empty(0)
    card = Card(capacity, outside)
    patch.setattr(CardGraph, "card", card, raising=False)
    stand_in_for_cuda(
        patch,
        CUDAGraph=CardGraph,
        is_available=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        memory_allocated=lambda device=None: card.allocated,
        memory_reserved=lambda device=None: card.used,
        mem_get_info=lambda device=None: (card.capacity - card.outside - card.used, card.capacity),
        memory_stats=lambda device=None: {"num_ooms": card.refused},
        get_device_properties=lambda device=None: SimpleNamespace(
            name="a pretended card", major=8, minor=6, total_memory=capacity, multi_processor_count=28
        ),
        _lazy_init=lambda: None,
    )
    patch.setattr(torch.Tensor, "device", property(card.device_of))
    patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: card.device_of(tensor).type == "cuda"))
    patch.setattr(torch.Tensor, "to", lambda tensor, *args, **kwargs: card.to(tensor, *args, **kwargs))
    patch.setattr(torch.Tensor, "cpu", lambda tensor, **kwargs: card.to(tensor, CPU, **kwargs))
    patch.setattr(torch.Tensor, "cuda", lambda tensor, device=GPU, **kwargs: card.to(tensor, device, **kwargs))
    patch.setattr(torch._C._nn, "pad_sequence", card.padded(torch._C._nn.pad_sequence))
    patch.setattr(torch, "tensor", lambda data, *, device=None, **how: _tensor(data, **how).to(device or CPU))
    patch.setattr(host_order, "undisturbed", lambda: _as_it_is(card))
    # weights come in through pinned buffers, as on a real one, but for small models these are small
    patch.setattr(torch, "get_num_threads", lambda: 2)
    # torch built for CUDA asks the driver
    patch.setattr(Operands, "reads_shared_heads", lambda operands: False)
    patch.setattr(Staging.__init__, "__defaults__", (BUFFER_BYTES,))
    patch.setattr(pinned_buffers, "_buffer", lambda size: torch.full((size,), 0xAA, dtype=torch.uint8))
    patch.setattr(pinned_buffers, "_spare", [])
    # with such a card these are torch's own
    spaces = surroundings._SPACES.items()
    stock = {home: {name: space[name] for name in names & space.keys()} for home, (space, names) in spaces}
    # it stands for the GPU, and is no mode of a program's
    # its clock is that of the CPU, so nothing is known of what plans earn
    patch.setattr(plan_cache.Earnings, "due", lambda self, kind: True)
    patch.setattr(torch_state, "_dispatch_modes", lambda: torch._C._len_torch_dispatch_stack() > 1)
    patch.setattr(surroundings, "_STOCK", stock)
    patch.setattr(surroundings, "_OWN", stock)
    patch.setattr(surroundings, "_last", surroundings.Surroundings())
    patch.setattr(Kernel, "__call__", lambda kernel, *args, **kwargs: _Launch(card, kernel)(*args, **kwargs))
    # there is nothing to compile for it, and a dry run, at four other sizes as well, computes what references do
    patch.setattr(plan_maker, "precompile", lambda graph, device: 0)
    patch.setattr(lean_calls, "unsupported", lambda device, dtypes: None)
    patch.setattr(plan_builder, "capture", _while(card, "blind", plan_builder.capture))
    for name in ("_run_static", "run_eagerly"):
        patch.setattr(plan.Plan, name, _while(card, "in_plan", getattr(plan.Plan, name)))
    patch.setattr(plan, "bind_attributes", _constants_on_the_card(plan.bind_attributes))
    # kept for good, and on a real card in system memory
    patch.setattr(quantise_rows, "hadamard", quantise_rows.hadamard.__wrapped__)
    run = _while(card, "in_plan", eight_bits_selection.run)
    patch.setattr(eight_bits_selection, "run", _constants_on_the_card(run))
    patch.setattr(plan_builder, "exact", _constants_on_the_card(_while(card, "in_plan", plan_builder.exact)))
    with card:
        yield card


def apart() -> Any:
    """Within, the card does not look at operations: for those of a twin, on the CPU alone."""
    return torch._C._DisableTorchDispatch()


def small_reserves(patch: pytest.MonkeyPatch, size: int, away: float = 0.1) -> None:
    """Adapters leave of the GPU's memory what suits a model of so many bytes: a tenth of it for a forward, twice as
    much for another model, and a part of it while the model is away."""
    for name, part in (("IDLE_RESERVE", away), ("WORKSPACE", 0.1), ("DECODING_RESERVE", away)):
        patch.setattr(gpu_room, name, int(part * size))
    patch.setattr(gpu_room, "NEXT_MODEL_RESERVE", 2 * size)


@contextlib.contextmanager
def _as_it_is(card: Card) -> Iterator[None]:
    """Within, the caller's modes are as before, and the card, which is one, sees what is allocated. A thread that keeps
    out of a trace has no modes, and a trace takes the card for the CPU."""
    was, card.blind = card.blind, False
    try:
        with contextlib.nullcontext() if torch._C._len_torch_dispatch_stack() else card:
            yield
    finally:
        card.blind = was


def _while(card: Card, state: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        was = getattr(card, state)
        setattr(card, state, True)
        try:
            return function(*args, **kwargs)
        finally:
            setattr(card, state, was)

    return around


def _constants_on_the_card(function: Callable[..., Any]) -> Callable[..., Any]:
    def around(graph_module: fx.GraphModule, *args: Any) -> Any:
        for node in graph_module.graph.nodes:
            if node.op == "get_attr" and not {"weight", "bank"} & node.meta.keys():
                constant = getattr(graph_module, node.target)
                for registry in (graph_module._parameters, graph_module._buffers):
                    registry.pop(node.target, None)
                graph_module.__dict__[node.target] = constant.to(GPU)
        return function(graph_module, *args)

    return around
