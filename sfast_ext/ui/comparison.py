"""Two images of one request, made with and without the extension: how far they are apart, and what each took."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Made:
    """One of the two images.

    Attributes:
        image: as Pillow has it.
        seconds: of the whole request, which may make several images at once.
        steps: how many were accelerated, prepared and left to the original.
        reason: why steps were left to the original.
        asked: prompts and seeds that it was made from.
    """

    image: Any
    seconds: float
    steps: dict[str, int]
    reason: str | None
    asked: tuple[Any, ...]


@dataclass(frozen=True)
class Compared:
    """Two images of one request.

    Attributes:
        told: what a page says of them. Differences are of 255, over all colours of all pixels.
        files: the images as PNG files, by the names that `told` has them under.
    """

    told: dict[str, Any]
    files: dict[str, bytes]


def compared(accelerated: Made, original: Made) -> Compared:
    """What came of making them."""
    one, other = _pixels(accelerated.image), _pixels(original.image)
    apart = np.abs(one - other) if one.shape == other.shape else None
    told = {
        "accelerated": _told(accelerated),
        "original": _told(original),
        "times": original.seconds / accelerated.seconds if accelerated.seconds > 0 else None,
        "mean_difference": None if apart is None else float(apart.mean()),
        "largest_difference": None if apart is None else int(apart.max()),
        "same_request": accelerated.asked == original.asked,
    }
    return Compared(told, {"accelerated": _file(accelerated.image), "original": _file(original.image)})


def _told(made: Made) -> dict[str, Any]:
    width, height = made.image.size
    shown = {"width": width, "height": height, "seconds": round(made.seconds, 3)}
    return {**shown, "steps": made.steps, "reason": made.reason}


def _file(image: Any) -> bytes:
    stream = io.BytesIO()
    # it is seen once: what is written fastest
    image.convert("RGB").save(stream, "PNG", compress_level=1)
    return stream.getvalue()


def _pixels(image: Any) -> np.ndarray[Any, Any]:
    return np.asarray(image.convert("RGB"), dtype=np.int16)
