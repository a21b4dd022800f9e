"""A contact sheet: rows of images with labels, as one image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_LABEL = 16  # pixels high
_GAP = 4
MAX_SIDE = 256
"""Pixels of the longer side of an image on a sheet."""


def difference(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, float]:
    """The absolute difference of two images, and the power of ten by which it is amplified to be seen."""
    apart = np.nan_to_num(np.abs(a.astype(np.float64) - b), nan=1.0, posinf=1.0)
    factor = amplification(apart)
    return np.clip(apart * factor, 0, 1), factor


def amplification(apart: np.ndarray) -> float:
    """The power of ten by which a difference is amplified to be seen: so that images of two runs can be compared. 1
    if there is none, or a value is not finite."""
    largest = apart.max()
    return float(10.0 ** np.floor(np.log10(1 / largest))) if np.isfinite(largest) and largest > 0 else 1.0


def sheet(head: Sequence[str], rows: Sequence[tuple[Sequence[np.ndarray], Sequence[str]]]) -> Any:
    """A PIL image.

    Args:
        head: a label for each column.
        rows: images (height, width, 3) of values from 0 to 1, all of one size, and a label under each.
    """
    from PIL import Image, ImageDraw

    height, width = rows[0][0][0].shape[:2]
    scale = min(1.0, MAX_SIDE / max(height, width))
    cell = max(1, round(width * scale)), max(1, round(height * scale))
    step = max(cell[0], 96) + _GAP, cell[1] + _LABEL + _GAP
    made = Image.new("RGB", (len(head) * step[0] + _GAP, _LABEL + len(rows) * step[1] + _GAP), "white")
    pen = ImageDraw.Draw(made)
    for column, label in enumerate(head):
        pen.text((_GAP + column * step[0], 2), label, fill="black")
    for row, (images, labels) in enumerate(rows):
        top = _LABEL + row * step[1]
        for column, (image, label) in enumerate(zip(images, labels, strict=True)):
            left = _GAP + column * step[0]
            values = (np.clip(np.nan_to_num(image), 0, 1) * 255).round().astype("uint8")
            made.paste(Image.fromarray(values).resize(cell), (left, top))
            pen.text((left, top + cell[1] + 1), label, fill="black")
    return made
