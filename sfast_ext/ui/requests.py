"""What a user asks to be prepared or measured: sizes, numbers of images and lengths of the prompt, from the tab or
from a request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from sfast_ext.ui.words import CHUNK, COUNTED

MIN_SIDE, MAX_SIDE, STEP = 64, 4096, 8
"""Pixels along a side."""
MAX_IMAGES = 16
MAX_COMBINATIONS = 32
"""So many combinations at once."""
PROMPTS = (COUNTED, 2 * COUNTED, 3 * COUNTED)
"""Lengths of a prompt, as the WebUI's counter next to it has them."""
MAX_BODY = 65536
"""Bytes of a request."""

FORMER = "pictures"
"""What requests may have in place of `images`: it was the field's name."""

_SIZE = re.compile("([0-9]{2,4})x([0-9]{2,4})")
_NUMBERS: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_IMAGES,
    "items": {"type": "integer", "minimum": 1, "maximum": MAX_IMAGES},
}

SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["sizes"],
    "properties": {
        "sizes": {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_COMBINATIONS,
            "items": {"type": "string", "pattern": f"^{_SIZE.pattern}$"},
            "description": f"width x height in pixels, each {MIN_SIDE} to {MAX_SIDE} and divisible by {STEP}",
        },
        "images": {
            **_NUMBERS,
            "default": [1],
            "description": "numbers of images that are made at once; each is combined with each size",
        },
        FORMER: {**_NUMBERS, "deprecated": True, "description": "an earlier name of images; one of the two is taken"},
        "tokens": {
            "type": "array",
            "minItems": 1,
            "maxItems": len(PROMPTS),
            "items": {"type": "integer", "enum": list(PROMPTS)},
            "description": "lengths of the prompt; each is combined with each size; without it, the last image's",
        },
    },
}
"""Of the body of a request, for the description of the API."""


class Invalid(ValueError):
    """What was asked for is not valid.

    Args:
        field: "sizes", "images" or "tokens".
        message: names the field and what it takes.
    """

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        super().__init__(message)


class Refused(Exception):
    """What was asked for cannot be done now. The message says what to do."""


def refusing(why: str) -> Callable[..., NoReturn]:
    """What is called in place of Prepare and Measure if they cannot be started."""

    def refuse(*_: Any) -> NoReturn:
        raise Refused(why)

    return refuse


@dataclass(frozen=True)
class Wanted:
    """One combination of what was asked for."""

    width: int
    height: int
    images: int
    tokens: int | None = None
    """The length of the prompt; None: that of the last image."""

    @property
    def tokens_of_model(self) -> int | None:
        """With the start and the end of each chunk: as plans have it."""
        return None if self.tokens is None else self.tokens // COUNTED * CHUNK

    @property
    def label(self) -> str:
        """For the user."""
        said = [f"{self.width}x{self.height}", "1 image" if self.images == 1 else f"{self.images} images"]
        return ", ".join(said if self.tokens is None else [*said, f"{self.tokens_of_model} tokens"])


def from_body(body: bytes) -> list[Wanted]:
    """What the body of a request asks for.

    Raises:
        ValueError: it is not valid; the message names the field and what it takes.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError('the body must be JSON, such as {"sizes": ["512x512"], "images": [1]}') from None
    if not isinstance(asked, Mapping):
        raise ValueError('the body must be an object, such as {"sizes": ["512x512"], "images": [1]}')
    unknown = [key for key in asked if key not in SCHEMA["properties"]]
    if unknown:
        raise ValueError(f"unknown field {_short(unknown[0])}; there are sizes, images and tokens")
    if FORMER in asked and "images" in asked:
        raise ValueError(f"images and {FORMER}, an earlier name of the same field, are both there: leave {FORMER} out")
    if "sizes" not in asked:
        raise ValueError('sizes is missing: a list, such as ["512x512"]')
    images = asked.get("images", asked.get(FORMER, [1]))
    return combined(asked["sizes"], images, _lengths(asked["tokens"]) if "tokens" in asked else ())


def from_text(sizes: str, images: str, tokens: Sequence[str] = ()) -> list[Wanted]:
    """What the fields of the tab ask for: values with commas between them, and the lengths that are ticked.

    Raises:
        ValueError: see `from_body`.
    """
    # people write 512 X 768 and 512×768, too
    written = [re.sub(r"\s*[xX\u00d7*]\s*", "x", each) for each in _split(sizes)]
    numbers = [int(each) if each.isascii() and each.isdigit() and len(each) < 5 else each for each in _split(images)]
    ticked = [int(each) if each.isascii() and each.isdigit() else each for each in tokens or ()]
    if not written:
        raise Invalid("sizes", "write at least one size, such as 512x512")
    return combined(written, numbers or [1], _lengths(ticked) if ticked else ())


def _split(text: str) -> list[str]:
    return [each.strip() for each in re.split(r"[,;\n]", text or "") if each.strip()]


def _lengths(tokens: Any) -> list[int]:
    if not isinstance(tokens, list) or not 1 <= len(tokens) <= len(PROMPTS):
        raise Invalid("tokens", f"tokens must be a list of 1 to {len(PROMPTS)} numbers, such as [{COUNTED}]")
    for length in tokens:
        if type(length) is not int or length not in PROMPTS:
            raise Invalid("tokens", f"tokens must be among {', '.join(map(str, PROMPTS))}; one is {_short(length)}")
    return tokens


def combined(sizes: Any, images: Any, tokens: Sequence[int]) -> list[Wanted]:
    """Each size with each number of images and each of these lengths of the prompt, which are valid.

    Raises:
        ValueError: see `from_body`.
    """
    if not isinstance(sizes, list) or not sizes:
        raise Invalid("sizes", 'sizes must be a list of at least one size, such as ["512x512"]')
    if not isinstance(images, list) or not images:
        raise Invalid("images", "images must be a list of at least one number, such as [1]")
    if len(sizes) * len(images) * max(1, len(tokens)) > MAX_COMBINATIONS:
        words = "combinations of sizes, images and tokens at once; these are more"
        raise Invalid("sizes", f"at most {MAX_COMBINATIONS} {words}")
    for number in images:
        if type(number) is not int or not 1 <= number <= MAX_IMAGES:
            what = f"images must be whole numbers from 1 to {MAX_IMAGES}"
            raise Invalid("images", f"{what}; one is {_short(number)}")
    found = [
        Wanted(*_size(size), number, length) for size in sizes for number in images for length in tokens or (None,)
    ]
    return list(dict.fromkeys(found))


def _size(size: Any) -> tuple[int, int]:
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise Invalid("sizes", f"a size must be width x height, such as 512x768; one is {_short(size)}")
    width, height = int(match[1]), int(match[2])
    if not all(MIN_SIDE <= side <= MAX_SIDE and side % STEP == 0 for side in (width, height)):
        raise Invalid(
            "sizes",
            f"the sides of a size must be {MIN_SIDE} to {MAX_SIDE} and divisible by {STEP}; one is {width}x{height}",
        )
    return width, height


def _short(value: Any) -> str:
    said = ascii(value)
    return said if len(said) <= 60 else f"{said[:57]}..."
