"""Digests of tensors, computed where they are: whether the values of weights changed, without a copy of them.

A tensor is read as 64-bit words, in rows of a prime number of words; the digest is the sum of each column, modulo 2^64,
and the words of the last, incomplete row. What changes a weight (a LoRA, a merge, another checkpoint) changes the sums.
As no row or column of a weight is a multiple of that prime long, its elements fall into other columns when it is
permuted. A tensor of less than two rows is its own digest.

`Digests` takes a tensor of up to `OWN_ROWS` as its own: of a thousand vectors those are one copy, while sums take two
launches for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from sfast_ext.weights.staging import in_memory_order, is_dense

COLUMNS = 127
OWN_ROWS = 16
_MAX_THREADS, _ALONE_BYTES = 6, 8 << 20
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Digests:
    """The digests of dense tensors of one device.

    They change with a tensor's layout as with its values.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        pieces = [_pieces(tensor) for tensor in tensors]
        self._forms = list(map(_form, pieces))
        # by the dtype of words: tensors, by their numbers, the lengths of their pieces, and these
        self._words: dict[torch.dtype, tuple[list[int], list[int], torch.Tensor]] = {}
        for dtype in {piece.dtype for each in pieces for piece in each}:
            found = [(number, piece) for number, each in enumerate(pieces) for piece in each if piece.dtype == dtype]
            numbers, lengths = [number for number, _ in found], [piece.numel() for _, piece in found]
            self._words[dtype] = numbers, lengths, torch.cat([piece for _, piece in found])

    def unchanged(self, tensors: Sequence[torch.Tensor | None]) -> list[bool]:
        """For each tensor whether it still has its digest; false if it is None. Waits for the device."""
        pieces = [[] if tensor is None else _pieces(tensor) for tensor in tensors]
        # what begins elsewhere in its memory may be read in narrower words
        same = [
            tensor is not None and _form(now) == form for tensor, now, form in zip(tensors, pieces, self._forms)
        ]
        for dtype, (numbers, lengths, before) in self._words.items():
            left = {number: iter(pieces[number]) for number in numbers if same[number]}
            words = [
                next(piece for piece in left[number] if piece.dtype == dtype) if number in left else was
                for number, was in zip(numbers, before.split(lengths))
            ]
            differing = (torch.cat(words) != before).cumsum(0)
            ends = torch.tensor(lengths).cumsum(0) - 1
            until = [0, *differing[ends.to(differing.device)].tolist()]
            for number, a, b in zip(numbers, until, until[1:]):
                same[number] = same[number] and a == b
        return same


def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """The digest of a tensor, on its device. If it is not dense, that of its elements."""
    return torch.cat(_parts(tensor if is_dense(tensor) else tensor.contiguous()))


def digests_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The digests of tensors in system memory, by several threads if they are large."""
    return reading(tensors)()


def reading(tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """`digests_of`, which threads begin now. What is returned waits for them."""
    threads = min(_MAX_THREADS, torch.get_num_threads())
    if threads < 2 or sum(tensor.nbytes for tensor in tensors) < _ALONE_BYTES:
        found = list(map(_by_numpy, tensors))
        return lambda: found
    digests = _pool(threads).map(_by_numpy, tensors)
    return lambda: list(digests)


@functools.lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Kept: it is used before each step of a model in 8 bits on a small card, and threads take longer to start than
    that lasts."""
    return ThreadPoolExecutor(threads, thread_name_prefix="sfast: digests")


def _by_numpy(tensor: torch.Tensor) -> torch.Tensor:
    """`digest_of` in one thread, without the GIL. Torch takes a thread for each core, also within each of these."""
    words = _words(tensor) if is_dense(tensor) else None
    rows = 0 if words is None else len(words) // COLUMNS
    if words is None or rows < 2:
        return digest_of(tensor)
    try:
        array = words.numpy()
    except RuntimeError:
        # torch was built for another NumPy, or there is none
        return digest_of(tensor)
    whole = rows * COLUMNS
    sums = array[:whole].reshape(rows, COLUMNS).sum(0, dtype="int64")
    return torch.cat([torch.from_numpy(sums), words[whole:].to(torch.int64)])


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    words = _words(tensor)
    rows = len(words) // COLUMNS
    if rows < 2:
        return [words.to(torch.int64)]
    whole = rows * COLUMNS
    sums = words[:whole].view(rows, COLUMNS).sum(0, dtype=torch.int64)
    return [sums, words[whole:].to(torch.int64)]


_Form = list[tuple[torch.dtype, int]]


def _form(pieces: Sequence[torch.Tensor]) -> _Form:
    return [(piece.dtype, piece.numel()) for piece in pieces]


def _pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What `Digests` has of a tensor, of which none is empty."""
    words = _words(tensor)
    rows = words.numel() // COLUMNS
    if rows < OWN_ROWS:
        return [words] if words.numel() else []
    whole = rows * COLUMNS
    sums = words[:whole].view(rows, COLUMNS).sum(0, dtype=torch.int64)
    return [sums, words[whole:]] if whole < words.numel() else [sums]


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as integers, as wide as its size and place allow."""
    size = tensor.element_size()
    narrowest = size * (tensor.numel() | tensor.storage_offset())
    dtype = next(dtype for dtype in _WORDS if not narrowest % dtype.itemsize)
    return (tensor if tensor.dim() == 1 else in_memory_order(tensor)).view(dtype)
