"""PNG files compressed by several threads: the pixels and everything else that Pillow writes.

A WebUI writes each image as PNG while the GPU waits: 0.2 s of one core for 1024x1024. Here the rows are filtered and
compressed in bands, as pigz does it: each band ends at a whole byte, and the next one may refer to the 32 KB in front
of it, so that a file is as large as Pillow's. Everything but the pixels, such as the infotext, Pillow writes itself.
Pillow writes what is no ordinary image, and what raises here.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger("sfast_ext")

BYTES = {"L": 1, "RGB": 3, "RGBA": 4}
"""Of a pixel, in the modes that are served."""
MIN_BYTES = 1 << 18
"""Of the pixels; a smaller image is compressed before the threads have started."""
MAX_THREADS = 8
"""More wait for each other: they share Python's lock."""
_THREAD = 3 << 16
"""Bytes of an image for each thread at least."""
_BAND = 1 << 19
"""Bytes of a band at most; NumPy's temporaries take some ten times as much."""
_MIN_BAND = 1 << 16
_MEMORY = 9  # of deflate; Pillow takes as much
_WINDOW = 1 << 15
"""Bytes in front of a band that deflate may refer to."""
_HEADER = b"\x78\x9c"  # zlib's: deflate, a window of 32 KB, the default level
_NONE, _SUB, _UP, _PAETH = 0, 1, 2, 4  # filter types of the PNG specification
_TRIED = (_NONE, _UP, _SUB, _PAETH)
"""In Pillow's order: of two that are as good, the first."""
_PILLOWS = "optimize", "dictionary", "bits"
"""Options of a file with which Pillow compresses in another way."""

Save = Callable[..., None]


def install(wanted: Callable[[], bool]) -> Callable[[], None]:
    """Take Pillow's place as the writer of PNG. Returns what gives it back.

    Nothing is done if Pillow is missing, if another writer is in the place of Pillow's, or if a small image written
    both ways does not come back as the same.

    Args:
        wanted: whether the next file is to be written so; asked for each.
    """
    try:
        from PIL import Image, PngImagePlugin

        pillows = Image.SAVE.get("PNG")
        if pillows is not PngImagePlugin._save:
            raise RuntimeError("PNG files are another writer's")
        _check(pillows)
    except Exception as exc:
        logger.debug("PNG files are compressed by Pillow: %s", exc)
        return lambda: None

    removed = False

    def save(im: Image.Image, fp: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        packed = None
        try:
            if not removed and not args and not kwargs and _serves(im) and wanted():
                packed = _packed(im)
        except Exception as exc:
            logger.debug("a PNG file is compressed by Pillow: %s", exc)
        if packed is None:
            pillows(im, fp, filename, *args, **kwargs)
        else:
            _write(pillows, im, fp, filename, packed)

    def remove() -> None:
        nonlocal removed
        removed = True
        # another writer may have been laid over it, and calls it still
        if Image.SAVE.get("PNG") is save:
            Image.register_save("PNG", pillows)

    Image.register_save("PNG", save)
    return remove


def _serves(im: Image.Image) -> bool:
    """Whether it is an ordinary image, large enough, with no option under which Pillow compresses in another way."""
    pixel = BYTES.get(im.mode)
    if pixel is None or pixel * im.width * im.height < MIN_BYTES:
        return False
    return not any(im.encoderinfo.get(name) for name in _PILLOWS)


def _packed(im: Image.Image) -> list[bytes]:
    """The compressed pixels."""
    options, pixel = im.encoderinfo, BYTES[im.mode]
    level, strategy = options.get("compress_level", -1), options.get("compress_type", -1)
    rows = np.frombuffer(im.tobytes(), np.uint8).reshape(im.height, pixel * im.width)
    return compressed(rows, pixel, level, zlib.Z_FILTERED if strategy == -1 else strategy)


def _write(pillows: Save, im: Image.Image, fp: Any, filename: Any, packed: list[bytes]) -> None:
    """Let Pillow write an image of one pixel with all that goes with `im`, whose size and pixels are put in."""
    from PIL import Image, PngImagePlugin

    pieces = iter(packed)

    def chunk(fp: Any, name: bytes, *data: bytes) -> None:
        if name == b"IHDR":
            size = im.width.to_bytes(4, "big") + im.height.to_bytes(4, "big")
            data = (size + b"".join(data)[len(size) :],)
        if name == b"IDAT":
            # all at the first
            for piece in pieces:
                PngImagePlugin.putchunk(fp, name, piece)
        else:
            PngImagePlugin.putchunk(fp, name, *data)

    pixel = Image.new(im.mode, (1, 1))
    pixel.info, pixel.encoderinfo = im.info, im.encoderinfo
    pillows(pixel, fp, filename, chunk=chunk)


def _check(pillows: Save) -> None:
    """Write a small image both ways.

    Raises:
        RuntimeError: it does not come back as the same.
    """
    from PIL import Image, PngImagePlugin

    infotext = PngImagePlugin.PngInfo()
    infotext.add_itxt("parameters", "Steps: 20")
    # smooth enough for every filter
    steps = np.random.default_rng(0).integers(-2, 3, (40, 30, 3))
    im = Image.fromarray(steps.cumsum(axis=0).cumsum(axis=1).astype(np.uint8))
    im.encoderinfo = {"pnginfo": infotext, "dpi": (72, 72)}
    files = BytesIO(), BytesIO()
    pillows(im, files[0], "")
    _write(pillows, im, files[1], "", _packed(im))
    theirs, ours = (Image.open(BytesIO(file.getvalue())) for file in files)
    if theirs.tobytes() != ours.tobytes() or theirs.info != ours.info:
        raise RuntimeError("Pillow writes PNG in another way")


def filtered(rows: np.ndarray, above: np.ndarray, pixel: int) -> np.ndarray:
    """rows (N, B) of pixels of `pixel` bytes, above (B) the row before them -> (N, 1 + B): each row with the filter
    whose differences add up to the least, as libpng and Pillow choose it."""
    up = np.concatenate((above[None], rows[:-1]))
    left, diagonal = np.zeros_like(rows), np.zeros_like(rows)
    left[:, pixel:], diagonal[:, pixel:] = rows[:, :-pixel], up[:, :-pixel]
    nearest = _paeth(left, up, diagonal)
    ways = rows, rows - up, rows - left, rows - nearest
    sums = [np.abs(way.view(np.int8)).view(np.uint8).sum(axis=1, dtype=np.uint32) for way in ways]
    best = np.argmin(sums, axis=0)
    out = np.empty((len(rows), 1 + rows.shape[1]), np.uint8)
    out[:, 0] = np.array(_TRIED, np.uint8)[best]
    for number, way in enumerate(ways):
        out[best == number, 1:] = way[best == number]
    return out


def _paeth(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Of the bytes to the left, above and diagonally above, the one nearest to a + b - c; of equal ones the first.

    In bytes alone: if both differences from c have the same sign, c is the furthest; otherwise its distance is the
    difference of their amounts. Chosen by masks, as NumPy's `where` branches at each byte.
    """
    to_a, to_b = np.maximum(b, c) - np.minimum(b, c), np.maximum(a, c) - np.minimum(a, c)
    to_c = np.maximum(to_a, to_b) - np.minimum(to_a, to_b)
    to_c |= _mask((b >= c) == (a >= c))
    nearest = c ^ ((b ^ c) & _mask(to_b <= to_c))
    nearest ^= (nearest ^ a) & _mask(to_a <= np.minimum(to_b, to_c))
    return nearest


def _mask(condition: np.ndarray) -> np.ndarray:
    """All bits set if it holds."""
    return np.negative(condition.view(np.uint8))


def deflated(band: np.ndarray, before: bytes, level: int, strategy: int, last: bool) -> bytes:
    """A band as deflate has it, behind `before`; it ends at a whole byte."""
    packer = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS, _MEMORY, strategy, before)
    return packer.compress(band) + packer.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)


def compressed(rows: np.ndarray, pixel: int, level: int = -1, strategy: int = zlib.Z_FILTERED) -> list[bytes]:
    """rows (H, B) of pixels of `pixel` bytes -> the data of a PNG, a zlib stream, in pieces.

    Args:
        level, strategy: as of `zlib.compressobj`.
    """
    threads = _threads(rows.size)
    size = min(_BAND, max(_MIN_BAND, rows.size // (2 * threads)))
    each = max(1, size // rows.shape[1])
    starts = range(0, len(rows), each)
    nothing = np.zeros(rows.shape[1], np.uint8)

    def filtered_from(start: int) -> np.ndarray:
        return filtered(rows[start : start + each], rows[start - 1] if start else nothing, pixel)

    with ThreadPoolExecutor(threads, "sfast-png") as pool:
        bands = [band.reshape(-1) for band in pool.map(filtered_from, starts)]
        before = [_end(bands[:number]) for number in range(len(bands))]
        last = [*itertools.repeat(False, len(bands) - 1), True]
        packed = pool.map(deflated, bands, before, itertools.repeat(level), itertools.repeat(strategy), last)
        check = functools.reduce(lambda value, band: zlib.adler32(band, value), bands, 1)
        # readers are used to neither a header nor a sum in a separate part
        first, *others = packed
        *pieces, end = _HEADER + first, *others
        return [*pieces, end + check.to_bytes(4, "big")]


def _end(bands: list[np.ndarray]) -> bytes:
    """The last bytes of bands that follow each other, as many as deflate may refer to."""
    found = b""
    while bands and len(found) < _WINDOW:
        *bands, last = bands
        found = last[-_WINDOW:].tobytes() + found
    return found[-_WINDOW:]


def _threads(size: int) -> int:
    """For an image of so many bytes."""
    # in a container fewer than the machine's
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_THREADS, cores, size // _THREAD))
