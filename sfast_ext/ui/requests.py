"""What a user asks to be prepared or measured: sizes and numbers of pictures, from the tab or from a request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LEAST, GREATEST, STEP = 64, 4096, 8
"""Pixels along a side."""
MOST_PICTURES = 16
MOST = 32
"""So many combinations of size and number of pictures at once."""
LONGEST = 65536
"""Bytes of a request."""

_SIZE = re.compile("([0-9]{2,4})x([0-9]{2,4})")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["sizes"],
    "properties": {
        "sizes": {
            "type": "array",
            "minItems": 1,
            "maxItems": MOST,
            "items": {"type": "string", "pattern": f"^{_SIZE.pattern}$"},
            "description": f"width x height in pixels, each {LEAST} to {GREATEST} and divisible by {STEP}",
        },
        "pictures": {
            "type": "array",
            "minItems": 1,
            "maxItems": MOST_PICTURES,
            "items": {"type": "integer", "minimum": 1, "maximum": MOST_PICTURES},
            "default": [1],
            "description": "numbers of pictures that are made at once; each is combined with each size",
        },
    },
}
"""Of the body of a request, for the description of the API."""


class Refused(Exception):
    """What was asked for cannot be done now. The message says what to do."""


@dataclass(frozen=True)
class Wanted:
    """One combination of what was asked for."""

    width: int
    height: int
    pictures: int

    @property
    def label(self) -> str:
        """For the user."""
        return f"{self.width}x{self.height}, " + ("1 picture" if self.pictures == 1 else f"{self.pictures} pictures")


def from_body(body: bytes) -> list[Wanted]:
    """What the body of a request asks for.

    Raises:
        ValueError: it is not valid; the message names the field and what it takes.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError('the body must be JSON, such as {"sizes": ["512x512"], "pictures": [1]}') from None
    if not isinstance(asked, Mapping):
        raise ValueError('the body must be an object, such as {"sizes": ["512x512"], "pictures": [1]}')
    unknown = [key for key in asked if key not in SCHEMA["properties"]]
    if unknown:
        raise ValueError(f"unknown field {_short(unknown[0])}; there are sizes and pictures")
    if "sizes" not in asked:
        raise ValueError('sizes is missing: a list, such as ["512x512"]')
    return combined(asked["sizes"], asked.get("pictures", [1]))


def from_text(sizes: str, pictures: str) -> list[Wanted]:
    """What the fields of the tab ask for: values with commas between them.

    Raises:
        ValueError: see `from_body`.
    """
    # people write 512 X 768 and 512×768, too
    written = [re.sub(r"\s*[xX\u00d7*]\s*", "x", each) for each in _split(sizes)]
    numbers = [int(each) if each.isascii() and each.isdigit() and len(each) < 5 else each for each in _split(pictures)]
    return combined(written, numbers or [1])


def _split(text: str) -> list[str]:
    return [each.strip() for each in re.split(r"[,;\n]", text or "") if each.strip()]


def combined(sizes: Any, pictures: Any) -> list[Wanted]:
    """Each size with each number of pictures.

    Raises:
        ValueError: see `from_body`.
    """
    if not isinstance(sizes, list) or not sizes:
        raise ValueError('sizes must be a list of at least one size, such as ["512x512"]')
    if not isinstance(pictures, list) or not pictures:
        raise ValueError("pictures must be a list of at least one number, such as [1]")
    if len(sizes) * len(pictures) > MOST:
        raise ValueError(f"at most {MOST} combinations of sizes and pictures at once; these are more")
    for number in pictures:
        if type(number) is not int or not 1 <= number <= MOST_PICTURES:
            raise ValueError(f"pictures must be whole numbers from 1 to {MOST_PICTURES}; one is {_short(number)}")
    found = [Wanted(*_size(size), number) for size in sizes for number in pictures]
    return list(dict.fromkeys(found))


def _size(size: Any) -> tuple[int, int]:
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise ValueError(f"a size must be width x height, such as 512x768; one is {_short(size)}")
    width, height = int(match[1]), int(match[2])
    if not all(LEAST <= side <= GREATEST and side % STEP == 0 for side in (width, height)):
        raise ValueError(
            f"the sides of a size must be {LEAST} to {GREATEST} and divisible by {STEP}; one is {width}x{height}"
        )
    return width, height


def _short(value: Any) -> str:
    said = ascii(value)
    return said if len(said) <= 60 else f"{said[:57]}..."
