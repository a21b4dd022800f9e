"""A sheet of images made in two ways: original, accelerated, and their difference on a scale that stands next to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SCALES = (1, 2, 5, 10, 20, 50, 100, 255)
"""What white may stand for. No less than 1 of 255, the smallest step of an image file: a difference below it is black,
as nobody can see it."""
HEAD = ("original", "accelerated", "difference (black: equal)")
_CELL = 256  # pixels of an image's longer side
_GAP, _BAR = 16, 18
_BACKGROUND, _INK, _FAINT = "white", "#202020", "#606060"


@dataclass
class Compared:
    """One image made in both ways, (height, width, 3) of values from 0 to 1."""

    what: str
    original: np.ndarray
    accelerated: np.ndarray

    @property
    def apart(self) -> np.ndarray:
        """By how much each pixel differs, of 255, in the channel where it differs most."""
        found = np.abs(self.original.astype(np.float64) - self.accelerated).max(axis=-1) * 255
        return np.nan_to_num(found, nan=255.0, posinf=255.0)


def scale_of(rows: Sequence[Compared]) -> int:
    """What white stands for, of 255."""
    largest = max(float(row.apart.max()) for row in rows)
    return next((scale for scale in SCALES if largest <= scale), SCALES[-1])


def coloured(share: np.ndarray) -> np.ndarray:
    """Shares of the scale as colours: black for none, then red and yellow, white for all of it."""
    return np.clip(np.stack([3 * share, 3 * share - 1, 3 * share - 2], axis=-1), 0, 1)


def sheet(title: str, rows: Sequence[Compared], footer: str) -> Any:
    """A PIL image: a title, a row for each image, the scale of the differences, and a line below."""
    from PIL import Image, ImageDraw

    scale, text, head = scale_of(rows), _font(14), _font(18)
    heights = [round(_CELL * min(1.0, row.original.shape[0] / row.original.shape[1])) for row in rows]
    top = _GAP + 26 + 24
    step = [height + 24 + _GAP for height in heights]
    width = _GAP + 3 * (_CELL + _GAP) + _BAR + 96
    made = Image.new("RGB", (width, top + sum(step) + 24), _BACKGROUND)
    pen = ImageDraw.Draw(made)
    lefts = [_GAP + column * (_CELL + _GAP) for column in range(3)]
    pen.text((_GAP, _GAP), title, fill=_INK, font=head)
    for left, label in zip(lefts, HEAD):
        pen.text((left, _GAP + 28), label, fill=_INK, font=text)
    below = top
    for row, height in zip(rows, heights):
        difference = coloured(row.apart / scale)
        for left, values in zip(lefts, (row.original, row.accelerated, difference)):
            made.paste(_fitted(values, height), (left, below))
            pen.rectangle((left - 1, below - 1, left + _CELL, below + height), outline="#c0c0c0")
        largest = f"largest difference {figure(float(row.apart.max()))} of 255"
        pen.text((_GAP, below + height + 4), f"{row.what}: {largest}", fill=_FAINT, font=text)
        below += height + 24 + _GAP
    _draw_scale(made, pen, (lefts[2] + _CELL + _GAP, top), heights[0], scale, text)
    pen.text((_GAP, below - 4), footer, fill=_INK, font=text)
    return made


def _draw_scale(made: Any, pen: Any, corner: tuple[int, int], height: int, scale: int, font: Any) -> None:
    left, top = corner
    shares = np.linspace(1, 0, height)[:, None].repeat(_BAR, axis=1)
    made.paste(_image(coloured(shares)), (left, top))
    pen.rectangle((left - 1, top - 1, left + _BAR, top + height), outline="#808080")
    half = figure(scale / 2)
    for at, label in ((0.0, f"{scale} of 255"), (0.5, half), (1.0, "0")):
        pen.text((left + _BAR + 6, top + at * (height - 16)), label, fill=_INK, font=font)


def _fitted(values: np.ndarray, height: int) -> Any:
    from PIL import Image

    image, canvas = _image(values), Image.new("RGB", (_CELL, height), "#f0f0f0")
    ratio = min(_CELL / image.width, height / image.height)
    sides = [max(1, round(side * ratio)) for side in (image.width, image.height)]
    fitted = image.resize((sides[0], sides[1]), Image.Resampling.BICUBIC)
    canvas.paste(fitted, ((_CELL - fitted.width) // 2, (height - fitted.height) // 2))
    return canvas


def _image(values: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray((np.clip(np.nan_to_num(values), 0, 1) * 255).round().astype("uint8"))


def _font(size: int) -> Any:
    from PIL import ImageFont

    try:
        return ImageFont.load_default(size)
    except TypeError:  # Pillow before 10.1 has one size
        return ImageFont.load_default()


def figure(value: float) -> str:
    """A difference with two digits that count: 0.00024, 3.1, 120."""
    if not np.isfinite(value):
        return "infinite"
    return f"{float(f'{value:.2g}'):.10f}".rstrip("0").rstrip(".") if value else "0"
