"""Repeats the launches of a run without the Python that decided on them.

Launch functions choose kernels, tiles and layouts by shapes, strides, alignment and the device. In a plan these are the
same at each run. Without a CUDA graph that replays the launches, to decide again takes the CPU longer than small images
take the GPU. So a run is recorded once.

What happens is recorded while it happens, so that tensors live no longer than without it. Views that are read for their
addresses alone are not made again: a launch knows the value whose memory it reads, and the distance from its start.

What a recording cannot know makes a run unrepeatable: a library that is called past torch's dispatcher, an operation
that writes to an input or a weight, a value that is read on the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sfast_ext.kernels.backend import launch_log, nvrtc, pdl
from sfast_ext.kernels.backend.launch_log import AddressTable, CudaLaunch, Entry, TensorMap, TritonLaunch
from sfast_ext.plans.register_machine import Assembler, Interpreter, Machine, Registers, Step, Steps

ALIGNMENT = 16
"""Bytes; no kernel asks for more."""
_MAX_MAPS = 64  # tensor maps that a launch keeps, by address
_POISON = 0xFF  # of it all floats are NaN
_EMPTY = frozenset(
    f"aten::{name}" for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
)
"""Operations that only allocate."""


class CannotRepeat(Exception):
    """Why a run is not repeatable."""


class RecordedRun:
    """Repeats a run of a program while the inputs have the shapes, strides and alignment of those recorded.

    Not for several threads at a time. The device that is current when it is made must be so when it is called.

    Args:
        program: had a run before: what is compiled or measured at a first run is not recorded.
        inputs: of the run that is recorded.

    Raises:
        CannotRepeat: the run is not repeatable, or its repetition gives other bits.
    """

    def __init__(self, program: Interpreter, inputs: Sequence[Tensor]) -> None:
        self._program = program
        self._index = inputs[0].device.index
        given = [*inputs, *program.tensors()]
        self._checks = [(x.shape, x.stride(), x.data_ptr() % ALIGNMENT) for x in given]
        recorder = _RunRecorder(given)
        with recorder.recording():
            result = list(program(*inputs))
        self._machine = recorder.machine(result)
        result = [x.cpu() for x in result]  # of a card's memory no more than a run takes
        # outputs that nothing wrote to would be those that the recorded run left there
        with _Poisoned():
            again = [x.cpu() for x in self(*inputs)]
        if not _same(again, result):
            raise CannotRepeat("the repetition differs")

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The program's flat outputs."""
        given = [*inputs, *self._program.tensors()]
        if not self._as_recorded(given):
            return list(self._program(*inputs))
        registers = self._machine.load(given)
        del given, inputs
        return list(self._machine.run(registers, nvrtc.current_stream(self._index) if self._index is not None else 0))

    def _as_recorded(self, given: Sequence[Tensor]) -> bool:
        for x, (shape, stride, residue) in zip(given, self._checks, strict=True):
            if x.data_ptr() % ALIGNMENT != residue or x.stride() != stride or x.shape != shape:
                return False
        return True


class _Taken(NamedTuple):
    step: Step
    reads: set[int]
    makes: tuple[int, ...]
    needed: bool
    """Whether it does more than to make values."""


class _RunRecorder(Assembler, TorchDispatchMode):
    """Records the operations and launches of a run. Tensors stand for values.

    Args:
        given: the tensors that come from outside.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        TorchDispatchMode.__init__(self)
        Assembler.__init__(self)
        self._registers: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id
        # by register: the one whose memory the value shares, and bytes behind its start
        self._roots: dict[int, tuple[int, int]] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._taken: list[_Taken] = []
        self._refusal: str | None = None
        self._given = len(given)
        for x in given:
            if self._knows(x):
                self._refusal = "two inputs are one tensor"
            self._add(x)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within is the run."""
        with launch_log.listening(self._launched), self:
            yield

    def machine(self, result: Sequence[Tensor]) -> Machine:
        """Repeats the run that was recorded.

        Raises:
            CannotRepeat: the run is not repeatable.
        """
        if self._refusal is not None:
            raise CannotRepeat(self._refusal)
        steps = self._needed({self.register_of(x) for x in result})
        return Machine(self.start, range(self._given), steps, self.readers(result))

    def register_of(self, x: Any) -> int | None:
        return self._register(x) if isinstance(x, Tensor) else None

    def has_values(self, structure: Any) -> bool:
        return any(True for _ in tensors(structure))

    def other_reader(self, structure: Any) -> Callable[[Registers], Any]:
        raise CannotRepeat(f"a {type(structure).__name__} of tensors")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._append(self._operation, function, args, kwargs or {}, result)
        return result

    def _launched(self, entry: Entry) -> None:
        self._append(self._launch, entry)

    def _append(self, steps: Callable[..., list[_Taken]], *what: Any) -> None:
        # raised here, it would end the run, or be taken for the failure of a kernel
        if self._refusal is None:
            try:
                self._taken += steps(*what)
            except CannotRepeat as exc:
                self._refusal = str(exc)

    def _launch(self, entry: Entry) -> list[_Taken]:
        if isinstance(entry, CudaLaunch):
            launch = _Launch(entry, self._root)
            return [_Taken(launch, launch.reads(), (), needed=True)]
        if isinstance(entry, TritonLaunch):
            reads = {self._register(x) for x in tensors((entry.args, entry.constants))}
            return [_Taken(self._triton_launch(entry), reads, (), needed=True)]
        raise CannotRepeat(entry.reason)

    def _triton_launch(self, launch: TritonLaunch) -> Step:
        run, constants, args = launch.kernel[launch.grid], launch.constants, self.readers(launch.args)

        def step(registers: Registers, stream: int) -> None:
            run(*args(registers), **constants)

        return step

    def _operation(self, function: Any, args: Any, kwargs: Any, result: Any) -> list[_Taken]:
        given, made = list(tensors((args, kwargs))), list(tensors(result))
        reads = {self._register(x) for x in given}
        if not made and result is not None:
            raise CannotRepeat(f"{function} reads values")  # numbers next to tensors are sizes
        written = _written(function, args, kwargs) if function._schema.is_mutable else ()
        if any(self._root(x)[0] < self._given for x in written):
            raise CannotRepeat(f"{function} writes to an input or a weight")
        makes = tuple(self._add(x, given) for x in made if not self._knows(x))
        if function._schema.name in _EMPTY:
            return [_Taken(_allocation(result, makes[0]), set(), makes, needed=False)]
        if len(makes) == len(made) and not function._schema.is_mutable and all(map(self._is_view, made)):
            return [self._view(x) for x in made]
        if isinstance(result, Tensor):
            step = self.call(function, args, kwargs, self._register(result))
        else:
            step = self._call_of_several(function, args, kwargs, [self._register(x) for x in made])
        return [_Taken(step, reads, makes, needed=True)]

    def _call_of_several(self, function: Any, args: Any, kwargs: Any, results: Sequence[int]) -> Step:
        read, named = self.readers(args), self.reader(kwargs)

        def step(registers: Registers, stream: int) -> None:
            for register, x in zip(results, tensors(function(*read(registers), **named(registers)))):
                registers[register] = x

        return step

    def _is_view(self, x: Tensor) -> bool:
        root = self._root(x)[0]
        return root != self._register(x) and self._dtypes[root] == x.dtype

    def _view(self, x: Tensor) -> _Taken:
        register, (root, distance) = self._register(x), self._root(x)
        return _Taken(_view(x, register, root, distance // x.element_size()), {root}, (register,), needed=False)

    def _needed(self, result: set[Any]) -> Steps:
        steps: Steps = []
        alive = set(result)
        for step, reads, makes, needed in reversed(self._taken):
            if not needed and not alive.intersection(makes):
                continue
            dead = {register for register in {*reads, *makes} - alive if register >= self._given}
            steps.append((step, tuple(sorted(dead))))
            alive |= reads
        return steps[::-1]

    def _add(self, x: Tensor, among: Sequence[Tensor] = ()) -> int:
        """The register of a new value. It may share memory with one of some tensors."""
        register = self.new_register()
        self._registers[id(x)] = weakref.ref(x), register
        self._dtypes[register] = x.dtype
        memory = x.untyped_storage().data_ptr()
        self._roots[register] = register, 0
        for other in among:
            if other.untyped_storage().data_ptr() == memory and x.numel():
                root, offset = self._root(other)
                self._roots[register] = root, offset + x.data_ptr() - other.data_ptr()
                break
        return register

    def _knows(self, x: Tensor) -> bool:
        found = self._registers.get(id(x))
        return found is not None and found[0]() is x

    def _register(self, x: Tensor) -> int:
        if not self._knows(x):
            raise CannotRepeat("a tensor comes from elsewhere")
        return self._registers[id(x)][1]

    def _root(self, x: Tensor) -> tuple[int, int]:
        return self._roots[self._register(x)]


class _Launch:
    """Launches a kernel in CUDA C++ with the addresses that tensors have now, in a capture with PDL if that is allowed.

    Args:
        root: the register of the value whose memory a tensor shares, and the bytes behind its start.
    """

    def __init__(self, launch: CudaLaunch, root: Callable[[Tensor], tuple[int, int]]) -> None:
        self._driver = nvrtc.loaded_driver()
        self._function, self._blocks, self._threads, self._shared = launch[:4]
        # it never begins early if it might read between the elements of a tensor
        dense = launch.early is not None and all(map(pdl.is_dense, launch.early))
        self._early = [(*root(x), x.nbytes) for x in launch.early or ()] if dense else None
        self._addresses: list[tuple[Any, int, int]] = []
        self._maps: list[tuple[int, Callable[[int], Any], dict[int, Any], int, int]] = []
        self._cells: list[Any] = []
        for i, x in enumerate(launch.parameters):
            self._cells.append(nvrtc.cell(x))
            if isinstance(x, Tensor):
                self._addresses.append((self._cells[-1], *root(x)))
            elif isinstance(x, TensorMap):
                self._maps.append((i, x.encode, {}, *root(x.tensor)))
            elif isinstance(x, AddressTable):
                for place, tensor in x.places.items():
                    self._addresses.append((ctypes.c_uint64.from_buffer(x.encoded, place), *root(tensor)))
        self._table = (ctypes.c_void_p * len(self._cells))(*map(ctypes.addressof, self._cells))
        self._at = ctypes.addressof(self._table)

    def reads(self) -> set[int]:
        """The registers of the values whose memory it reads or writes."""
        early = {register for register, *_ in self._early or ()}
        return early | {register for _, register, _ in self._addresses} | {register for *_, register, _ in self._maps}

    def __call__(self, registers: Registers, stream: int) -> None:
        for cell, register, offset in self._addresses:
            cell.value = registers[register].data_ptr() + offset
        for i, encode, known, register, offset in self._maps:
            address = registers[register].data_ptr() + offset
            encoded = known.get(address)
            if encoded is None:
                if len(known) >= _MAX_MAPS:
                    known.clear()
                encoded = known[address] = encode(address)
            self._table[i] = ctypes.addressof(encoded)
        if self._early is not None and pdl.in_pdl_capture():
            early = ((registers[register].data_ptr() + offset, size) for register, offset, size in self._early)
            if pdl.allowed_at(early):
                config = pdl.launch_config(self._blocks, self._threads, self._shared, stream)
                self._driver.cuLaunchKernelEx(config, self._function, self._at)
                return
        self._driver.cuLaunchKernel(self._function, self._blocks, (self._threads, 1, 1), self._shared, stream, self._at)


def _allocation(x: Tensor, register: int) -> Step:
    """Makes a tensor like x, uninitialised."""
    make = functools.partial(torch.empty_strided, tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device)

    def step(registers: Registers, stream: int) -> None:
        registers[register] = make()

    return step


def _view(x: Tensor, register: int, root: int, offset: int) -> Step:
    """Makes x, a view of a value of the same dtype, however many views lie between.

    Args:
        root: the register of that value.
        offset: elements behind its start.
    """
    size, stride = tuple(x.shape), x.stride()

    def step(registers: Registers, stream: int) -> None:
        whole = registers[root]
        registers[register] = whole.as_strided(size, stride, whole.storage_offset() + offset)

    return step


class _Poisoned(TorchDispatchMode):
    """Within, new memory is filled with NaN."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function._schema.name in _EMPTY and result.numel():
            size = result.untyped_storage().nbytes() // result.element_size()
            torch.as_strided(result, (size,), (1,), 0).view(torch.uint8).fill_(_POISON)
        return result


def tensors(structure: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists and dicts."""
    if isinstance(structure, Tensor):
        yield structure
    elif isinstance(structure, (list, tuple)):
        for x in structure:
            yield from tensors(x)
    elif isinstance(structure, dict):
        yield from tensors(list(structure.values()))


def _written(function: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The arguments of an operation that it writes to."""
    declared = function._schema.arguments
    named = {**dict(zip((a.name for a in declared), args)), **kwargs}
    for argument in declared:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors(named.get(argument.name))


def _same(these: Sequence[Tensor], those: Sequence[Tensor]) -> bool:
    """Whether two lists of tensors are equal, bit for bit."""
    return len(these) == len(those) and all(
        a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(_bits(a), _bits(b))
        for a, b in zip(these, those)
    )


def _bits(x: Tensor) -> Tensor:
    # NaN differs from itself
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(kinds[x.element_size()]) if x.element_size() in kinds else x
