"""The values of arguments. Each function here reads the text of one, or says in a line how to write it."""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sfast_ext.tools.lib import Unavailable, names, weight_files

ENGINES = ("sfast", "eager", "eager-channels-last", "cudagraph", "torch-compile", "torch-compile-blocks")
ATTENTIONS = ("sdp", "plain", "sliced", "xformers", "doggettx", "v1", "invokeai", "subquad")
DTYPES = ("float16", "bfloat16", "float32")
SMALLEST, LARGEST = 64, 8192
"""Pixels of a side. The blocks of a UNet halve it six times."""
MOST = 1_000_000


def whole(least: int, most: int, example: int) -> Callable[[str], int]:
    """The reader of whole numbers between two limits."""

    def number(text: str) -> int:
        digits = text.strip()
        # a number of thousands of digits is text for Python as well
        if re.fullmatch(r"[+-]?[0-9]{1,18}", digits) is None or not least <= int(digits) <= most:
            raise ArgumentTypeError(f"{text!r} must be a whole number from {least} to {most}, e.g. {example}")
        return int(digits)

    return number


count = whole(1, MOST, 8)
"""How many images, or calls."""
steps = whole(1, 1000, 20)
"""Steps of a sampler: a model knows no more."""
tokens = whole(1, 10_000, 77)
"""Tokens of a prompt."""
_batch = whole(1, 1024, 4)


def size(text: str, smallest: int = SMALLEST) -> tuple[int, int]:
    """WIDTHxHEIGHT in pixels, both multiples of 8."""
    found = re.fullmatch(r"([+-]?\d{1,9})\s*[xX×*]\s*([+-]?\d{1,9})", text.strip(), re.ASCII)
    if found is None:
        raise ArgumentTypeError(f"{text!r} must be WIDTHxHEIGHT in pixels, e.g. 512x512")
    width, height = map(int, found.groups())
    if not all(smallest <= side <= LARGEST for side in (width, height)):
        within = "x".join(str(min(max(side // 8 * 8, smallest), LARGEST)) for side in (width, height))
        raise ArgumentTypeError(f"{text!r}: width and height must be {smallest} to {LARGEST} pixels, e.g. {within}")
    if width % 8 or height % 8:
        below, above = (f"{up(width)}x{up(height)}" for up in (_rounded_down, _rounded_up))
        raise ArgumentTypeError(f"{text!r}: width and height must be multiples of 8, e.g. {below} or {above}")
    return width, height


def _rounded_down(side: int) -> int:
    return side // 8 * 8


def _rounded_up(side: int) -> int:
    return -(-side // 8) * 8


def sizes(text: str) -> list[tuple[int, int]]:
    """Sizes with commas between."""
    return _listed(text, size, "size", "512x512,768x512")


def counts(text: str) -> list[int]:
    """Whole numbers from 1 with commas between."""
    return _listed(text, _batch, "number", "1,4")


def engines(text: str) -> list[str]:
    """Names of engines with commas between; Stable Fast is always measured and stands first."""
    named = _listed(text, _engine, "engine", "eager,cudagraph; sfast alone measures Stable Fast alone")
    return ["sfast", *(name for name in dict.fromkeys(named) if name != "sfast")]


def _engine(text: str) -> str:
    if text not in ENGINES:
        raise ArgumentTypeError(f"no engine is called {text!r}. {_known(text, ENGINES)}")
    return text


def _listed(text: str, read: Callable[[str], Any], what: str, example: str) -> list[Any]:
    found = [read(part.strip()) for part in text.split(",") if part.strip()]
    if not found:
        raise ArgumentTypeError(f"{text!r} names no {what}: write e.g. {example}")
    return found


def _known(text: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(text.lower(), known, n=1)
    return (f"Did you mean {near[0]}? " if near else "") + f"There are {', '.join(known)}"


def capability(text: str) -> tuple[int, int]:
    """A compute capability as compilers name it: sm_89 is 8.9."""
    digits = text.strip().lower().removeprefix("sm_")
    if not (digits.isascii() and digits.isdecimal()) or not 2 <= len(digits) <= 3:
        raise ArgumentTypeError(f"{text!r} is no compute capability, e.g. sm_89 for 8.9")
    return int(digits[:-1]), int(digits[-1])


def unet_model(text: str) -> str:
    """A model by its name, or the path of one."""
    return _model(text, names.ALL, pipeline=False)


def image_model(text: str) -> str:
    """A model that makes images of text, by its name, or the path of one."""
    if text in names.ALL and text not in names.TEXT_TO_IMAGE:
        makes = ", ".join(names.TEXT_TO_IMAGE)
        raise ArgumentTypeError(f"{text} makes no image of a text alone: name one of {makes}, or a path")
    return _model(text, names.TEXT_TO_IMAGE, pipeline=True)


def _model(text: str, known: Sequence[str], *, pipeline: bool) -> str:
    if text in known:
        return text
    if not text.strip():
        raise ArgumentTypeError(f"{text!r} names no model. {_known(text, known)}; or write the path of one")
    path = Path(text).expanduser()
    if not _exists(path):
        said = "" if _looks_like_a_path(text) else f"no model is called {text!r}. {_known(text, known)}; and "
        raise ArgumentTypeError(f"{said}there is no file or folder {text}")
    try:
        weight_files.check(path, pipeline=pipeline)
    except Unavailable as exc:
        raise ArgumentTypeError(str(exc)) from None
    return str(path)


def _looks_like_a_path(text: str) -> bool:
    return "/" in text or "\\" in text or Path(text).suffix.lower() in (".safetensors", ".ckpt", ".pt", ".pth", ".bin")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no system has
        return False


def text_file(text: str) -> Path:
    """A file of text that can be read."""
    path = Path(text).expanduser()
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ArgumentTypeError(f"{text} is no text in UTF-8: save it as UTF-8") from None
    except (OSError, ValueError) as exc:
        raise ArgumentTypeError(f"{text!r} cannot be read: {_why(exc)}") from None
    return path


def output_file(text: str) -> Path:
    """A file that can be written."""
    if not text.strip():
        raise ArgumentTypeError("the name of the file is empty: write e.g. results.json")
    path = Path(text).expanduser()
    if path.is_dir() or text.endswith(("/", os.sep)):
        raise ArgumentTypeError(f"{text!r} is a folder: name a file in it, e.g. {path / 'results.json'}")
    return path


def output_folder(text: str) -> Path:
    """A folder that can be written."""
    if not text.strip():
        raise ArgumentTypeError("the name of the folder is empty: write e.g. output")
    path = Path(text).expanduser()
    if _exists(path) and not path.is_dir():
        raise ArgumentTypeError(f"{text!r} is a file: name a folder")
    return path


def make_room(file: Path | None, folder: Path | None) -> None:
    """Makes the folders of results, and tries to write there, before anything is measured.

    Raises:
        Unavailable: nothing can be written there.
    """
    for where in [*([folder] if folder else []), *([file.parent] if file else [])]:
        try:
            where.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=where):
                pass
        except (OSError, ValueError) as exc:
            raise Unavailable(f"nothing can be written into {where}: {_why(exc)}; name another folder") from exc
    if file is not None and file.exists() and not os.access(file, os.W_OK):
        raise Unavailable(f"{file} cannot be written: name another file")


def _why(exc: Exception) -> str:
    return (exc.strerror if isinstance(exc, OSError) else None) or weight_files.first_line(exc)
