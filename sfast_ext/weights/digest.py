"""Digests of tensors, computed where they are: whether the values of weights changed, without a copy of them.

A tensor is read as 64-bit words, in rows of a prime number of words; the digest is the sum of each column, modulo 2^64,
and the words of the last, incomplete row. What changes a weight (a LoRA, a merge, another checkpoint) changes the sums.
As no row or column of a weight is a multiple of that prime long, its elements fall into other columns when it is
permuted. A tensor of less than two rows is its own digest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from sfast_ext.weights.staging import in_memory_order, is_dense

COLUMNS = 127
_MAX_THREADS, _ALONE_BYTES = 6, 8 << 20
_TASKS = 4  # of a thread: each takes the GIL, which the caller has other uses for
_WORDS = (
    torch.int64, torch.uint8, torch.int16, torch.uint8, torch.int32, torch.uint8, torch.int16, torch.uint8
)  # fmt: skip
"""By the last three bits of a size and a place in bytes."""


class Digests:
    """The digests of dense tensors of one device.

    They change with a tensor's layout as with its values.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        parts = [_parts(tensor) for tensor in tensors]
        self._lengths = list(map(_length, parts))
        self._values = torch.cat([part for each in parts for part in each])

    def unchanged(self, tensors: Sequence[torch.Tensor | None]) -> list[bool]:
        """For each tensor whether it still has its digest; false if it is None. Waits for the device."""
        before = self._values.split(self._lengths)
        parts = [None if tensor is None else _parts(tensor) for tensor in tensors]
        # what begins elsewhere in its memory may be read in narrower words
        there = [now is not None and _length(now) == length for now, length in zip(parts, self._lengths)]
        values = [
            part for now, was, is_there in zip(parts, before, there) for part in (now if now and is_there else [was])
        ]
        differing = (torch.cat(values) != self._values).cumsum(0)
        ends = torch.tensor(self._lengths).cumsum(0) - 1
        until = [0, *differing[ends.to(differing.device)].tolist()]
        return [is_there and a == b for is_there, a, b in zip(there, until, until[1:])]


def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """The digest of a tensor, on its device. If it is not dense, that of its elements."""
    return torch.cat(_parts(tensor if is_dense(tensor) else tensor.contiguous()))


def digests_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The digests of tensors in system memory, by several threads if they are large."""
    return reading(tensors)()


def reading(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """`digests_of`, which threads begin now. What is returned waits for them."""
    threads, size = min(_MAX_THREADS, torch.get_num_threads()), sum(tensor.nbytes for tensor in tensors)
    if threads < 2 or size < _ALONE_BYTES:
        found = _all_by_numpy(tensors)
        return lambda: found
    digests = _pool(threads).map(_all_by_numpy, _groups(tensors, size // (_TASKS * threads)))
    return lambda: [digest for group in digests for digest in group]


def _groups(tensors: Sequence[torch.Tensor], size: int) -> list[list[torch.Tensor]]:
    """Neighbours together, until they have so many bytes."""
    groups, left = list[list[torch.Tensor]](), 0
    for tensor in tensors:
        if left <= 0:
            groups.append([])
            left = size
        groups[-1].append(tensor)
        left -= tensor.nbytes
    return groups


@functools.lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Kept: it is used before each step of a model in 8 bits on a small card, and threads take longer to start than
    that lasts."""
    return ThreadPoolExecutor(threads, thread_name_prefix="sfast: digests")


def _all_by_numpy(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list(map(_by_numpy, tensors))


def _by_numpy(tensor: torch.Tensor) -> torch.Tensor:
    """`digest_of` in one thread, without the GIL. Torch takes a thread for each core, also within each of these."""
    words = _words(tensor) if is_dense(tensor) else None
    rows = 0 if words is None else words.numel() // COLUMNS
    if words is None or rows < 2:
        return digest_of(tensor)
    whole = rows * COLUMNS
    found = torch.empty(COLUMNS + words.numel() - whole, dtype=torch.int64, device="cpu")
    try:
        array, out = words.numpy(), found.numpy()
    except RuntimeError:
        # torch was built for another NumPy, or there is none
        return digest_of(tensor)
    array[:whole].reshape(rows, COLUMNS).sum(0, dtype="int64", out=out[:COLUMNS])
    out[COLUMNS:] = array[whole:]
    return found


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    words = _words(tensor)
    rows = words.numel() // COLUMNS
    if rows < 2:
        return [words.to(torch.int64)]
    sums = words.as_strided((rows, COLUMNS), (COLUMNS, 1)).sum(0, dtype=torch.int64)
    return [sums, words[rows * COLUMNS :].to(torch.int64)]


def _length(parts: Iterable[torch.Tensor]) -> int:
    """The words of a digest. `len` of a tensor asks whether it is traced, in Python."""
    return sum(part.numel() for part in parts)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as integers, as wide as its size and place allow."""
    flat = in_memory_order(tensor)
    return flat.view(_WORDS[(flat.numel() | flat.storage_offset()) * flat.element_size() & 7])
