"""Whether this Python has what a command needs, and what to type if another one does."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sfast_ext.tools.lib import Unavailable

PACKAGE = Path(__file__).absolute().parents[1]
OLDEST = (3, 10)
ENVIRONMENTS = ("venv", ".venv", "env", "system/python", "python_embeded", "python")
"""Folders of WebUIs, relative to theirs or to one above it, that contain an interpreter and its packages."""
PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "pillow", "tqdm")
"""What the commands need, if the file with tested versions is not here."""
_PYTHONS = ("bin/python", "bin/python3", "Scripts/python.exe", "python.exe")


def check(packages: Iterable[str], arguments: Sequence[str]) -> None:
    """Raises:
    Unavailable: a package is missing here, or torch cannot be imported; the message says what to type.
    """
    missing = [name for name in packages if sys.modules.get(name) is None and importlib.util.find_spec(name) is None]
    if "torch" in missing:
        raise Unavailable(f"this Python ({sys.executable}) has no torch. {_instead(arguments)}")
    if missing:
        raise Unavailable(_install(missing))
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as exc:
        said = f"torch of {sys.executable} cannot be imported ({_short(exc)})"
        raise Unavailable(f"{said}. {_instead(arguments)}") from exc


def told(exc: ImportError, arguments: Sequence[str]) -> str:
    """What to do about a package that is missing, or does not fit the others."""
    home = (exc.name or "").partition(".")[0]
    if home == "torch":
        return f"this Python ({sys.executable}) has no torch that can be imported. {_instead(arguments)}"
    if isinstance(exc, ModuleNotFoundError) and home:
        return _install([home])
    return f"a package cannot be imported ({_short(exc)}). {_install([])}"


def too_old(version: Sequence[int]) -> str | None:
    """What to do if this Python is older than the oldest that is supported."""
    if tuple(version[:2]) >= OLDEST:
        return None
    needed, here = (".".join(map(str, each[:2])) for each in (OLDEST, version))
    return f"Python {needed} or later is needed; this is {here} ({sys.executable}). {_instead(sys.argv[1:])}"


def _instead(arguments: Sequence[str]) -> str:
    found = next(iter(webui_pythons()), None)
    if found is not None:
        return f"Type: {_command(found, arguments)}"
    python = r"venv\Scripts\python.exe" if os.name == "nt" else "venv/bin/python"
    return f"Use the WebUI's Python, which lies in the WebUI's folder: {_command(Path(python), arguments)}"


def _install(packages: Sequence[str]) -> str:
    needed = f"this Python ({sys.executable}) has no {', '.join(packages)}. " if packages else ""
    file = PACKAGE.parent / "requirements-demo.txt"
    listed: tuple[object, ...] = ("-r", file) if file.is_file() else PACKAGES
    python = Path("sfast-venv", *(("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")))
    steps = _words(sys.executable, "-m", "venv", "sfast-venv"), _words(python, "-m", "pip", "install", *listed)
    return f"{needed}Install what is needed outside of the WebUI: {'; '.join(steps)}; then use {_words(python)}"


def _command(python: Path, arguments: Sequence[str]) -> str:
    # a path to the package works in every folder, `-m sfast_ext` in one
    return _words(python, PACKAGE, *(arguments or ["doctor"]))


def _words(*words: object) -> str:
    texts = [str(each) for each in words]
    return subprocess.list2cmdline(texts) if os.name == "nt" else shlex.join(texts)


def webui_pythons() -> Iterator[Path]:
    """Interpreters with torch, other than this one, in the WebUI that the extension is installed in or this process
    was started in."""
    named = [Path(value) for key in ("VENV_DIR", "venv_dir") if (value := os.environ.get(key, "").strip())]
    around = [PACKAGE.parent, *PACKAGE.parents[1:4], PACKAGE.resolve().parent, *PACKAGE.resolve().parents[1:4]]
    around += [Path.cwd(), *Path.cwd().parents[:3]]
    seen = {Path(sys.prefix).resolve()}
    for folder in [*named, *(above / name for above in around for name in ENVIRONMENTS)]:
        try:
            own = folder.resolve()
            if own in seen:
                continue
            seen.add(own)
            python = next((folder / name for name in _PYTHONS if (folder / name).is_file()), None)
            if python is not None and _has_torch(folder):
                yield python.absolute()
        except (OSError, RuntimeError):  # a folder that may not be read, a circle of links
            continue


def _has_torch(folder: Path) -> bool:
    places = ("lib/python3*/site-packages/torch", "Lib/site-packages/torch")
    return any(found.is_dir() for place in places for found in folder.glob(place))


def _short(exc: BaseException) -> str:
    return next(iter(str(exc).strip().splitlines()), "") or type(exc).__name__
