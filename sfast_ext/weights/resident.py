"""Weights of which the GPU has the 8-bit integers alone: their half-precision values stay in system memory.

A *resident* bank is not read from a live tensor. It is made of what the module holds, wherever that is: the host's own
tensor in system memory, which comes to the GPU in small parts, or a tensor on the GPU, which is then set aside. So the
module's parameters are the truth, as they are for live tensors, and the host changes them as it always does.

Before a plan with such banks runs, `due` asks for each of these parameters whether it is the same object, in the same
memory, with the same version. What changed is quantised again. A write that torch does not count (through `.data` or
NumPy) is found by a digest: of all of them with the first call of a generation, and of `AUDITED_BYTES` with each other
call, so each is read within some calls. Before the original forward runs, `bring_back` moves parameters to the GPU.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from sfast_ext import reasons
from sfast_ext.weights import host_copies
from sfast_ext.weights.aside import Aside, Asides, Hidden, differing, joined, lent, places_in, state_of
from sfast_ext.weights.banks import Bank, batches
from sfast_ext.weights.digest import digest_of, reading
from sfast_ext.weights.expected import expected
from sfast_ext.weights.original_layout import live_tensor, set_data
from sfast_ext.weights.staging import Staging, to_system_memory
from sfast_ext.weights.stand_ins import StandIns
from sfast_ext.weights.streamed import Streamed
from sfast_ext.weights.streamed_by_layer import StreamedByLayer
from sfast_ext.weights.tracked import TrackedWeights
from sfast_ext.weights.vacancy import vacancies
from sfast_ext.weights.weight import Weight, WeightsAway, WeightSlot

AUDITED_BYTES = 32 << 20
"""Whose digest is computed in each call: 3.7 GB, those of SDXL, are read within 120 calls."""
BATCH_BYTES = 96 << 20
"""Half-precision values that are on the GPU at once while banks are filled."""

Quantise = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor],
                     Sequence[int]], object]  # fmt: skip
"""`kernels.eight_bits.quantise_weights.launch`."""


class Resident:
    """The resident banks of one model, and the parameters that they are made of. `bring_back`, `sync` and `set_aside`
    are called while no plan of the model and no original forward runs."""

    def __init__(self, tracked: TrackedWeights) -> None:
        self._tracked, self._asides = tracked, Asides()
        self._copies, self._turn, self._thread = host_copies.HostCopies(), 0, threading.local()
        self.alone = threading.RLock()  # held while a forward has parameters of one layer after the other on the GPU
        self.standing = threading.RLock()  # held while they stand in: they are without their values
        self.device: torch.device | None = None
        """That of the banks."""
        self._reading: Callable[[], set[int]] | None = None
        self.in_parts = False
        """Whether the host keeps a part of the module in system memory: nothing comes back from there."""
        self.audit_all = False
        """Whether the next `sync` computes the digests of all; one that restores only begins to."""

    def __bool__(self) -> bool:
        return bool(self._asides)

    @property
    def banks(self) -> list[Bank]:
        """Those that plans hold."""
        return self._tracked.banks.resident()

    @property
    def ready(self) -> bool:
        """Whether all banks have values. No plan may run before."""
        return all(bank.ready for bank in self.banks)

    def is_aside(self, value: torch.Tensor) -> bool:
        """Whether a parameter is one of them."""
        return any(aside.now is value for aside in self._asides)

    def out(self, device: torch.device | None) -> bool:
        """Whether parameters are in system memory, and the rest of the module on this device, the GPU of the banks."""
        there = device is not None and device == self.device and not self.in_parts
        return there and bool(self.elsewhere())

    def set_aside(self, weights: Iterable[Weight], device: torch.device) -> None:
        """Move the parameters of weights, which no plan reads, to system memory, and free the memory that plans would
        read."""
        tracked, weights, self.device = self._tracked, list(weights), device
        parts = list({id(part): part for weight in weights for part in weight.parts or (weight,)}.values())
        self._leave([aside.now for part in parts for aside in self._asides.made_of(part)])
        known = [*tracked.known(), *tracked.packs.all()]
        live = [w for w in (*weights, *parts) if id(w) not in tracked.vacant and not w.is_bare]
        given, _ = vacancies(live, known, tracked.layouts)
        tracked.vacate(given)
        tracked.reset_detector()
        tracked.forget(tracked.vacant)

    def expect(self, device: torch.device, there: bool = False) -> None:
        """Before there are banks: what may be in 8 bits counts as set aside, if it is in system memory.

        Args:
            there: whether what is on the device counts, too: it may `leave`.
        """
        self._asides.include(expected(self._tracked.root, device if there else None).values())
        self.device = device

    def keep_used(self) -> None:
        """What came to the GPU for plans, and of which no bank is made, does not count as set aside any more."""
        used = {id(aside) for bank in self.banks for aside, _ in bank.sources} | set(map(id, self.elsewhere()))
        self._asides.keep([each for each in self._asides if not used.isdisjoint({id(each), id(each.now)})])

    def has(self, weight: Weight) -> bool:
        """Whether all parameters of a weight are among these."""
        return all(map(self._asides.of, weight.parts or (weight,)))

    def values(self, weight: Weight) -> torch.Tensor:
        """The half-precision values of a weight that was set aside, on the GPU, in memory that is not kept."""
        assert self.device is not None
        parts = [aside.checked() for aside in self._asides.made_of(weight)]
        if len(parts) == 1:
            return self._on_gpu(parts)[0]
        return joined(parts, self.device)

    def bank(self, weight: Weight, group: int) -> Bank:
        """The resident bank of a weight that was set aside, without values if it is new."""
        sources, first = [], 0
        for aside in self._asides.made_of(weight):
            sources.append((aside, first))
            first += aside.shape[0]
        assert self.device is not None
        return self._tracked.banks.get_resident(weight, group, tuple(sources), self.device)

    def due(self, restore: Callable[[list[Bank]], object] | None = None) -> list[Bank]:
        """The banks whose values are not those of the module. Looks at the module alone.

        Args:
            restore: called with the banks whose values are in system memory, without those that are known to have
                changed. What is found by reading weights meanwhile is told by the next call, see `reads`.

        Raises:
            WeightsChanged: a parameter is none that banks can be made of.
            WeightsAway: one is nowhere.
        """
        banks = self.banks
        used = {id(aside): aside for bank in banks for aside, _ in bank.sources}
        changed = {key for key, aside in used.items() if aside.changed()}

        def is_due(bank: Bank) -> bool:
            return not bank.known or bool(changed) and any(id(aside) in changed for aside, _ in bank.sources)

        before, self._reading = self._reading, None
        changed |= before() if before is not None else set()
        # what a call left that did not end was read too early for the next generation
        if before is None or restore is not None or self.audit_all:
            # what is quantised in any case need not be read before
            read = {id(aside) for bank in banks if bank.known for aside, _ in bank.sources} - changed
            told = self._audited([used[key] for key in used if key in read])
            if restore is None:
                changed |= told()
            else:
                self._reading = told
                restore([bank for bank in banks if not bank.ready and not is_due(bank)])
        return [bank for bank in banks if is_due(bank)]

    @property
    def reads(self) -> bool:
        """Whether weights are read for changes meanwhile, of which the next `due` tells."""
        return self._reading is not None

    def fill(self, banks: Sequence[Bank], quantise: Quantise) -> None:
        """Quantise the parameters of banks, and set aside those that are on the GPU.

        Raises:
            WeightsAway: the GPU has no memory left.
            WeightsChanged: see `due`.
        """
        tracked = self._tracked
        leaving = {id(aside.now) for bank in banks for aside, _ in bank.sources}
        # no reference may keep memory on the GPU: graphs of plans that are gone are cycles
        left = [key for key, w in tracked.weights.items() if not w.plans and id(w.bound) in leaving]
        # while it is known of which parameter they are
        tracked.order.left({id(tracked.weights[key].bound) for key in left})
        for key in left:
            tracked.weights.pop(key).let_go()
        tracked.packs.drop_unread()
        try:
            staging = Staging()
            with torch.inference_mode(False), torch.no_grad(), staging:
                self._fill(banks, quantise, staging)
        except torch.cuda.OutOfMemoryError as exc:
            raise WeightsAway(reasons.NO_ROOM_FOR_WEIGHTS()) from exc
        finally:
            tracked.banks.look()
        tracked.copied += len(banks)

    def _fill(self, banks: Sequence[Bank], quantise: Quantise, staging: Staging) -> None:
        left, seen = False, list[tuple[Aside, tuple[Any, ...], torch.Tensor]]()
        parts_left = {id(bank): len(bank.sources) for bank in banks}
        for some in batches(banks, BATCH_BYTES):
            for bank, *_ in some:
                bank.copies = None
                bank.occupy()
            asides = list({id(aside): aside for _, aside, _ in some}.values())
            held = [aside.checked() for aside in asides]
            states = list(map(state_of, held))
            there = dict(zip(map(id, asides), self._on_gpu(held, staging)))
            lists: list[list[Any]] = [[], [], [], [], []]
            for bank, aside, first in some:
                value = there[id(aside)]
                rows = slice(first, first + len(value))
                # those of a convolution have its sums in a second row
                scales = bank.scales[rows] if bank.scales.dim() == 1 else bank.scales
                if value.dim() == 4:
                    value = value.contiguous(memory_format=torch.channels_last)
                entry = value, bank.rows[rows], scales, bank.digests[rows], bank.group
                for each, operand in zip(lists, entry):
                    each.append(operand)
                del value
            quantise(*lists)
            lists.clear()
            digests = [digest_of(value) for value in there.values()]
            for bank, *_ in some:
                parts_left[id(bank)] -= 1
                bank.ready = bank.ready or not parts_left[id(bank)]
            arriving = [value for value in held if value.is_cuda]
            self._leave(arriving)
            left = left or bool(arriving)
            moved = set(map(id, arriving))
            for aside, value, state, digest in zip(asides, held, states, digests):
                # a parameter that just left has other memory, with the same values
                seen.append((aside, state_of(value) if id(value) in moved else state, digest))
        # the GPU is waited for once
        sizes = [len(digest) for *_, digest in seen]
        on_cpu = torch.cat([digest for *_, digest in seen]).cpu().split(sizes) if seen else ()
        for (aside, state, _), digest in zip(seen, on_cpu):
            aside.seen, aside.digest = state, digest
        if left:
            torch.cuda.empty_cache()  # a host that asks the driver how much is free is told of it

    def _audited(self, asides: list[Aside]) -> Callable[[], set[int]]:
        """Read all of these, or the next ones in turn. What is returned gives `differing`."""
        asides = [aside for aside in asides if aside.digest is not None]
        count, left = len(asides), sum(a.bytes for a in asides) if self.audit_all else AUDITED_BYTES
        self.audit_all, chosen = False, list[Aside]()
        while left > 0 and len(chosen) < count:
            self._turn = (self._turn + 1) % count
            chosen.append(asides[self._turn])
            left -= chosen[-1].bytes
        with torch.inference_mode(False), torch.no_grad():
            digests = reading([live_tensor(aside.checked()) for aside in chosen])
        return functools.partial(differing, chosen, digests)

    def bring_back(self) -> int:
        """Move the parameters to the GPU. Returns how many.

        Raises:
            torch.cuda.OutOfMemoryError: there is no room for all of them. None has moved.
        """
        with torch.inference_mode(False), torch.no_grad():
            sources: host_copies.Sources = [(value, live_tensor(value)) for value in self.elsewhere()]
            # all of them before the first is copied, which takes longer
            arriving = [torch.empty_like(source, device=self.device) for _, source in sources]
            with Staging() as copy:
                for there, (_, source) in zip(arriving, sources):
                    copy(there, source)
            for there, (value, _) in zip(arriving, sources):
                set_data(value, there)
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            # they are theirs again if nothing changes them, see `_leave`; else their values are copied
            self._copies.keep(self._tracked.root, sources)
        if not self.banks:
            self.forget()
        # what was set aside for a plan that was not made
        self._tracked.refresh_live()
        return len(arriving)

    def bring_back_plainly(self) -> int:
        """`bring_back` as a host would do it, one parameter after the other. What was kept of them is dropped.

        Raises:
            torch.cuda.OutOfMemoryError: there is no room. Some have moved.
        """
        self._copies.drop()
        with torch.inference_mode(False), torch.no_grad():
            moved = self.elsewhere()
            for value in moved:
                set_data(value, live_tensor(value).to(self.device))
        return len(moved)

    def elsewhere(self) -> list[torch.Tensor]:
        """Its parameters that are in system memory."""
        return self._asides.elsewhere(self._tracked.root)

    def _leave(self, values: Iterable[Any]) -> None:
        """Move parameters to system memory: to what they had there, if nothing changed them on the GPU. There they have
        the host's strides."""
        if not (leaving := [v for v in values if isinstance(v, torch.Tensor) and v.is_cuda]):
            return
        layouts, order = self._tracked.layouts, self._tracked.order
        paths = {id(aside.now): aside.path for aside in self._asides}
        laid = [(v, original) for v in leaving if v.dim() == 4
                and (original := layouts.strides_of(v, [paths[id(v)]])) is not None]  # fmt: skip
        # the last launch may still read them
        torch.cuda.synchronize(self.device)
        host_copies.put_back_everywhere(leaving)
        with torch.inference_mode(False), torch.no_grad():
            rest = [v for v in leaving if v.is_cuda]
            for value, there in zip(rest, to_system_memory([live_tensor(v) for v in rest])):
                set_data(value, there)
            for value, original in laid:
                if value.stride() != original:
                    layouts.restore(value, original)
        order.left(set(map(id, leaving)))

    def _on_gpu(self, values: Sequence[torch.Tensor], staging: Staging | None = None) -> list[torch.Tensor]:
        if staging is None:
            with (own := Staging()):
                return self._on_gpu(values, own)
        assert self.device is not None
        with torch.inference_mode(False), torch.no_grad():
            found = []
            for source in map(live_tensor, values):
                if not source.is_cuda:
                    there = torch.empty(source.shape, dtype=source.dtype, device=self.device)
                    staging.copy(there, source)
                    source = there
                found.append(source)
            staging.deliver()
        return found

    @property
    def is_streamed(self) -> bool:
        """Whether this thread is within `streamed`."""
        return getattr(self._thread, "streams", False)

    @contextlib.contextmanager
    def streamed(self, by_layer: bool = False) -> Iterator[None]:
        """Within, the original forward may run in this thread: see `Streamed` and `StreamedByLayer`."""
        assert self.device is not None
        with torch.inference_mode(False), torch.no_grad():
            values, self._thread.streams = list(map(live_tensor, self.elsewhere())), True
        try:
            with (StreamedByLayer if by_layer else Streamed)(values, self.device):
                yield
        finally:
            self._thread.streams = False

    def hidden(self) -> Hidden:
        """Within, the parameters in system memory are empty ones on the GPU: a host that moves the module there leaves
        them where they are."""
        assert self.device is not None
        return Hidden(self._asides, self.device)

    def standing_in(self) -> StandIns:
        """See `StandIns`."""
        assert self.device is not None
        return StandIns(self._tracked, self.elsewhere(), self.device)

    def leave(self) -> None:
        """Move the parameters to system memory that came back to the GPU."""
        self._leave([aside.now for aside in self._asides])

    @contextlib.contextmanager
    def lent(self, module: nn.Module) -> Iterator[None]:
        """Within, the parameters of one layer that are in system memory are on the GPU, for a host that changes them
        there. Afterwards their values are where they were."""
        with lent(self.elsewhere(), module, self._on_gpu):
            yield

    def places_in(self, root: nn.Module) -> list[tuple[Aside, list[WeightSlot]]] | None:
        """See `aside.places_in`."""
        return places_in(self._asides, self._tracked.root, root)

    def follow(self, places: list[tuple[Aside, list[WeightSlot]]]) -> None:
        """The banks are those of another module from now on, see `places_in`."""
        self._copies.drop()
        for aside, slots in places:
            aside.slots, aside.seen, aside.digest = slots, None, None
        self._asides.keep(self._asides)

    def take_over(self, other: Resident) -> None:
        """The parameters that were set aside for another accelerator of the module."""
        self._asides.include(other._asides)
        self.device = other.device
        other.forget()

    def forget(self) -> None:
        """No plan has such banks any more, and the parameters are the host's to move."""
        self._asides, self._reading = Asides(), None
        self._copies.drop()

    @property
    def bytes(self) -> int:
        """What the parameters take in half precision."""
        return sum(aside.bytes for aside in self._asides)
