"""What a recorded run did, as steps that can be repeated: allocations, operations of torch, launches.

Views that are read for their addresses alone are not made again: a launch knows the value whose memory it reads, and
the distance from its start.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sfast_ext.kernels.backend import nvrtc
from sfast_ext.kernels.backend.launch_log import CudaLaunch, TensorMap, TritonLaunch

ALIGNMENT = 16
"""Bytes; no kernel asks for more."""
_MAPS = 64  # tensor maps that a launch keeps, by address

Values = list[Any]
Step = Callable[[Values, int], None]
"""Takes the values and the handle of the current stream."""


class CannotRepeat(Exception):
    """Why a run is not repeatable."""


class Repetition:
    """Steps over a list of values, the first of which come from outside.

    Args:
        checks: shape, strides and address modulo `ALIGNMENT` of the tensors that come from outside.
        steps: each with the values that nothing reads behind it.
        added: the number of further values.
        result: the values that are the result.
    """

    def __init__(
        self,
        checks: list[tuple[torch.Size, tuple[int, ...], int]],
        steps: list[tuple[Step, tuple[int, ...]]],
        added: int,
        result: list[int],
    ) -> None:
        self._checks, self._steps, self._result = checks, steps, result
        self._added = [None] * added

    def values(self, given: Sequence[Tensor]) -> Values | None:
        """The values at the start; None where a tensor is not as it was recorded."""
        for x, (shape, stride, residue) in zip(given, self._checks, strict=True):
            if x.data_ptr() % ALIGNMENT != residue or x.stride() != stride or x.shape != shape:
                return None
        return [*given, *self._added]

    def run(self, values: Values, stream: int) -> list[Tensor]:
        """The result."""
        for step, dead in self._steps:
            step(values, stream)
            for place in dead:
                values[place] = None
        return [values[place] for place in self._result]


class Launch:
    """Launches a kernel in CUDA C++ with the addresses that tensors have now.

    Args:
        root: the place of the value whose memory a tensor shares, and the bytes behind its start.
    """

    def __init__(self, launch: CudaLaunch, root: Callable[[Tensor], tuple[int, int]]) -> None:
        self._driver = nvrtc.loaded_driver()
        self._function, self._blocks, self._threads, self._shared = launch[:4]
        self._addresses: list[tuple[ctypes.c_void_p, int, int]] = []
        self._maps: list[tuple[int, Callable[[int], Any], dict[int, Any], int, int]] = []
        self._cells: list[Any] = []
        for i, x in enumerate(launch.parameters):
            self._cells.append(nvrtc.cell(x))
            if isinstance(x, Tensor):
                self._addresses.append((self._cells[-1], *root(x)))
            elif isinstance(x, TensorMap):
                self._maps.append((i, x.encode, {}, *root(x.tensor)))
        self._table = (ctypes.c_void_p * len(self._cells))(*map(ctypes.addressof, self._cells))
        self._at = ctypes.addressof(self._table)

    def reads(self) -> set[int]:
        """The places of the values whose memory it reads or writes."""
        return {place for _, place, _ in self._addresses} | {place for *_, place, _ in self._maps}

    def __call__(self, values: Values, stream: int) -> None:
        for cell, place, offset in self._addresses:
            cell.value = values[place].data_ptr() + offset
        for i, encode, known, place, offset in self._maps:
            address = values[place].data_ptr() + offset
            encoded = known.get(address)
            if encoded is None:
                if len(known) >= _MAPS:
                    known.clear()
                encoded = known[address] = encode(address)
            self._table[i] = ctypes.addressof(encoded)
        self._driver.cuLaunchKernel(self._function, self._blocks, (self._threads, 1, 1), self._shared, stream, self._at)


def triton_launch(launch: TritonLaunch, place: Callable[[Tensor], int]) -> Step:
    """Launches a kernel of Triton."""
    run, constants = launch.kernel[launch.grid], launch.constants
    args = arguments(launch.args, place)

    def step(values: Values, stream: int) -> None:
        run(*args(values), **constants)

    return step


def allocation(x: Tensor, at: int) -> Step:
    """Makes a tensor like x, uninitialised."""
    make = functools.partial(torch.empty_strided, tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device)

    def step(values: Values, stream: int) -> None:
        values[at] = make()

    return step


def view(x: Tensor, at: int, root: int, offset: int) -> Step:
    """Makes x, a view of a value of the same dtype, however many views lie between.

    Args:
        root: the place of that value.
        offset: elements behind its start.
    """
    size, stride = tuple(x.shape), x.stride()

    def step(values: Values, stream: int) -> None:
        whole = values[root]
        values[at] = whole.as_strided(size, stride, whole.storage_offset() + offset)

    return step


def operation(function: Any, args: Any, kwargs: Any, result: Any, place: Callable[[Tensor], int]) -> Step:
    """Calls an operation of torch. Its result has places already."""
    args, kwargs = arguments(args, place), maker(kwargs, place)
    if isinstance(result, Tensor):
        at = place(result)

        def step(values: Values, stream: int) -> None:
            values[at] = function(*args(values), **kwargs(values))

        return step
    places = [place(x) for x in tensors(result)]

    def steps(values: Values, stream: int) -> None:
        for at, x in zip(places, tensors(function(*args(values), **kwargs(values)))):
            values[at] = x

    return steps


def arguments(args: tuple[Any, ...], place: Callable[[Tensor], int]) -> Callable[[Values], list[Any]]:
    """`maker` for positional arguments, most of which are tensors or constants."""
    constants = list(args)
    direct = [(i, place(x)) for i, x in enumerate(args) if isinstance(x, Tensor)]
    within = [
        (i, maker(x, place)) for i, x in enumerate(args) if not isinstance(x, Tensor) and any(True for _ in tensors(x))
    ]
    for i, _ in (*direct, *within):
        constants[i] = None

    def make(values: Values) -> list[Any]:
        made = constants.copy()
        for i, at in direct:
            made[i] = values[at]
        for i, nested in within:
            made[i] = nested(values)
        return made

    return make


def maker(structure: Any, place: Callable[[Tensor], int]) -> Callable[[Values], Any]:
    """A function that makes a structure of values, with constants as they are."""
    if isinstance(structure, Tensor):
        at = place(structure)
        return lambda values: values[at]
    if not any(True for _ in tensors(structure)):
        return lambda values: structure
    if isinstance(structure, dict):
        named = {name: maker(x, place) for name, x in structure.items()}
        return lambda values: {name: make(values) for name, make in named.items()}
    kind = type(structure)
    if kind not in (list, tuple):
        raise CannotRepeat(f"a {kind.__name__} of tensors")
    makers = [maker(x, place) for x in structure]
    return lambda values: kind([make(values) for make in makers])


def tensors(structure: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists and dicts."""
    if isinstance(structure, Tensor):
        yield structure
    elif isinstance(structure, (list, tuple)):
        for x in structure:
            yield from tensors(x)
    elif isinstance(structure, dict):
        yield from tensors(list(structure.values()))
