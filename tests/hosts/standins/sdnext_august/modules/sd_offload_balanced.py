"""Balanced offload, which has a module for itself: July's code, which looks up its names here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_july = Path(__file__).parents[2] / "sdnext_root" / "modules" / "sd_offload.py"
exec(compile(_july.read_text(encoding="utf-8"), str(_july), "exec"), globals())


def forget_hook() -> None:
    """Have a new one made: it has read the watermarks and the lists when it was made."""
    globals()["offload_hook_instance"] = None


def modules_of(pipe: Any) -> dict[str, Any]:
    """The networks of a pipeline by the names of its parts."""
    return {name: value for name, value in vars(pipe).items() if any(value is each for each in _modules(pipe))}  # type: ignore[name-defined]  # noqa: F821
