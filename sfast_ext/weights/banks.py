"""Banks: weights of linear layers and convolutions as 8-bit integers, next to those that they are made of.

A bank is written by the plans that read it, at the start of each run (`kernels.eight_bits.quantise_weights`), from the
live tensors of the arena: rows whose digest changed are quantised again. So a bank holds no values that nobody checks,
and whatever changes a live tensor reaches it at the next run. The module knows nothing of it.

All plans of a model share the banks of its weights. A bank is freed with the last plan that reads it. While the host
has the weights elsewhere, its memory is given back as well (`vacate`), and `occupy` allocates it again without values:
its digests are those of no row.

A *resident* bank is not written by plans, but by `Resident.sync`, from what the module holds in system memory. When it
is vacated its values are kept in system memory, if that has room: they come back in half the time that it takes to
quantise them again, or less, and need no more than a copy.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from sfast_ext.weights.aside import Aside
from sfast_ext.weights.staging import Staging, to_system_memory
from sfast_ext.weights.weight import Weight

COPIES_RESERVE = 3 << 30
"""Bytes of system memory that are left free next to copies of banks, in addition to what the host leaves."""

_OF_CONVOLUTION = 10  # rows of scales and sums, as of kernels.eight_bits.quantise_weights.SCALES


@dataclass(eq=False)
class Bank:
    """A weight as 8-bit integers.

    Attributes:
        weight: what it is made of.
        group: so many neighbours of a row are rotated, 0: none.
        rows: (N, K) in int8; of a convolution's weight (N, C, H, W) K is H W C, in this order.
        scales: (N,) in float32; of a convolution's weight (10, N), all but the first sums of the codes of each row.
        digests: (N,) in int64, of the rows of the weight that `rows` were made of; 0: of none.
        sources: of a resident bank, the parameters that it is made of, each with its first row.
        ready: whether it has values, if it is resident.
        copies: its values in system memory, if it is resident and was vacated since it was filled.
    """

    weight: Weight | None
    group: int
    rows: torch.Tensor
    scales: torch.Tensor
    digests: torch.Tensor
    sources: tuple[tuple[Aside, int], ...] = ()
    ready: bool = True
    copies: tuple[torch.Tensor, ...] | None = None

    @property
    def known(self) -> bool:
        """Whether there are values of it, on the GPU or in system memory."""
        return self.ready or self.copies is not None

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Its tensors. Plans hold these objects: their memory is exchanged, never the objects."""
        return self.rows, self.scales, self.digests

    @property
    def bytes(self) -> int:
        """What it takes while it has memory."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @property
    def vacant(self) -> bool:
        """Whether it has no memory."""
        return self.rows.numel() > 1 and self.rows.stride(-1) == 0

    def vacate(self) -> None:
        """See `Banks.vacate`. Copies stay."""
        self.ready = not self.sources
        for tensor in self.tensors:
            tensor.data = torch.zeros((1,), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

    def occupy(self) -> None:
        """Allocate the memory again, if there is none.

        Raises:
            torch.cuda.OutOfMemoryError: there is no room; it stays without memory.
        """
        if self.vacant:
            made = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in self.tensors]
            made[2].zero_()
            for tensor, memory in zip(self.tensors, made, strict=True):
                tensor.data = memory


class Banks:
    """The banks of a model's weights, by weight and group. They live as long as a plan holds them."""

    def __init__(self) -> None:
        self._banks: weakref.WeakValueDictionary[tuple[tuple[int, ...], int], Bank] = weakref.WeakValueDictionary()
        self.vacant = False
        """Whether some have no memory. No plan may run before `occupy`."""
        self.fits: Callable[[int], bool] | None = None
        """Whether system memory has room for so many bytes; None: it has."""

    def resident(self) -> list[Bank]:
        """Those that plans do not write."""
        return [bank for bank in self._banks.values() if bank.sources]

    def get_resident(
        self, weight: Weight, group: int, sources: tuple[tuple[Aside, int], ...], device: torch.device
    ) -> Bank:
        """The resident bank of a weight, without values if it is new.

        Raises:
            torch.cuda.OutOfMemoryError: there is no room for a new one.
        """
        # of another layer at its path the sources are others, and plans may have both
        key = tuple(id(aside) for aside, _ in sources), group
        bank = self._banks.get(key)
        if bank is None or bank.sources != sources:
            with torch.inference_mode(False), torch.no_grad():
                made = [torch.empty(size, dtype=kind, device=device) for size, kind in _layout(weight.tensor.shape)]
                made[2].zero_()
            bank = self._banks[key] = Bank(None, group, made[0], made[1], made[2], sources, ready=False)
        return bank

    def get(self, weight: Weight, group: int) -> Bank:
        """The bank of a weight in half precision, (N, K) or a convolution's.

        Raises:
            torch.cuda.OutOfMemoryError: there is no room for a new one.
        """
        bank = self._banks.get(((id(weight),), group))
        # a weight that is gone may have had the same number
        if bank is None or bank.weight is not weight:
            live = weight.tensor
            with torch.inference_mode(False), torch.no_grad():
                made = [torch.empty(size, dtype=dtype, device=live.device) for size, dtype in _layout(live.shape)]
                made[2].zero_()
            bank = self._banks[(id(weight),), group] = Bank(weight, group, *made)
        return bank

    def missing(self, weights: Iterable[Weight]) -> int:
        """The bytes of the banks of weights that have none yet."""
        known = {id(bank.weight) for bank in self._banks.values() if bank.weight is not None}
        wanted = {id(weight): weight.tensor.shape for weight in weights if id(weight) not in known}
        return sum(math.prod(size) * dtype.itemsize for shape in wanted.values() for size, dtype in _layout(shape))

    def vacate(self, most: float = math.inf) -> int:
        """Free their memory, that of the largest first, until so many bytes are free. Tensors keep shape, dtype and
        device. No plan may be running. Returns how many bytes were freed."""
        chosen, freed = [], 0
        # memory of small ones is shared with others, and comes free with the last of them
        for bank in sorted((b for b in self._banks.values() if not b.vacant), key=lambda b: b.bytes, reverse=True):
            if freed >= most:
                break
            chosen.append(bank)
            freed += bank.bytes
        with torch.inference_mode(False), torch.no_grad():
            for device in {bank.rows.device for bank in chosen if bank.rows.is_cuda}:
                # the last launch may still read it
                torch.cuda.synchronize(device)
            self._keep([bank for bank in chosen if bank.sources and bank.ready and bank.copies is None])
            for bank in chosen:
                self.vacant = True
                bank.vacate()
        return freed

    def _keep(self, banks: list[Bank]) -> None:
        """Copy the values of banks to system memory, if there is room."""
        size = sum(bank.bytes for bank in banks)
        # else it raises, and what was copied is gone
        with contextlib.suppress(RuntimeError, MemoryError):
            if size and (self.fits is None or self.fits(size + COPIES_RESERVE)):
                copies = iter(to_system_memory([tensor for bank in banks for tensor in bank.tensors]))
                for bank in banks:
                    bank.copies = next(copies), next(copies), next(copies)

    def restore(self, banks: Sequence[Bank]) -> None:
        """Copy the values of these banks back to the GPU.

        Raises:
            torch.cuda.OutOfMemoryError: there is no room; all stay without memory.
        """
        if any(bank.rows.is_cuda for bank in banks):
            # in what the allocator holds free of other values, banks would lie between those to come, and all would
            # have to leave for one large value; torch 2.1 refuses while a CUDA graph is captured
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()
        with torch.inference_mode(False), torch.no_grad():
            try:
                with Staging() as copy:
                    for bank in banks:
                        bank.occupy()
                        for tensor, kept in zip(bank.tensors, bank.copies or (), strict=True):
                            copy(tensor, kept)
            except BaseException:
                for bank in banks:
                    bank.vacate()
                raise
            for bank in banks:
                bank.ready = True
            self.look()

    def occupy(self) -> None:
        """Allocate the memory again. The next run of a plan fills it; of resident banks `Resident.sync` does both.

        Raises:
            torch.cuda.OutOfMemoryError: there is no room; they stay without memory.
        """
        if not self.vacant:
            return
        with torch.inference_mode(False), torch.no_grad():
            banks = [bank for bank in self._banks.values() if bank.vacant and not bank.sources]
            made = [[torch.empty_like(x, memory_format=torch.contiguous_format) for x in b.tensors] for b in banks]
            for bank, tensors in zip(banks, made, strict=True):
                tensors[2].zero_()
                for tensor, memory in zip(bank.tensors, tensors, strict=True):
                    tensor.data = memory
        self.look()

    def __len__(self) -> int:
        return len(self._banks)

    def look(self) -> None:
        """Set `vacant` as it is: memory of resident banks comes back one by one."""
        self.vacant = any(bank.vacant for bank in self._banks.values())

    @property
    def held(self) -> int:
        """What they take on the device now."""
        return total(bank for bank in self._banks.values() if not bank.vacant)

    @property
    def bytes(self) -> int:
        """What they take on the device, or are going to take again."""
        return total(self._banks.values())


def total(banks: Iterable[Bank]) -> int:
    """The bytes of banks, each counted once."""
    return sum(bank.bytes for bank in {id(bank): bank for bank in banks}.values())


def batches(banks: Iterable[Bank], most: int) -> Iterator[list[tuple[Bank, Aside, int]]]:
    """What resident banks are made of, with its first row, in groups of so many bytes."""
    some: list[tuple[Bank, Aside, int]] = []
    size = 0
    for bank, (aside, first) in ((each, source) for each in banks for source in each.sources):
        if some and size + aside.bytes > most:
            yield some
            some, size = [], 0
        some.append((bank, aside, first))
        size += aside.bytes
    if some:
        yield some


def _layout(shape: torch.Size) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    rows = torch.Size(shape[:1])
    codes = torch.Size((*rows, math.prod(shape[1:])))
    scales = torch.Size((_OF_CONVOLUTION, *rows)) if len(shape) == 4 else rows
    return (codes, torch.int8), (scales, torch.float32), (rows, torch.int64)
