"""The stand-ins of attention libraries, for the tests that import them; other tests do not see them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
HOMES = {
    "xformers": HERE / "xformers_standin",
    "flash_attn": HERE / "attention_standins",
    "sageattention": HERE / "attention_standins",
}
# they look for xformers when they are imported: what they find is not to depend on which test came first
SEEKERS = ("ldm.modules.diffusionmodules.openaimodel", "diffusers.models.attention_processor")
# a module that registers operators is imported once in a process
_loaded: dict[str, dict[str, ModuleType]] = {}


@contextmanager
def imported(name: str, *parts: str) -> Iterator[ModuleType]:
    """A stand-in and some of its submodules, in sys.modules within."""

    def its_own() -> dict[str, ModuleType]:
        return {key: module for key, module in sys.modules.items() if key.partition(".")[0] == name}

    for seeker in SEEKERS:
        with suppress(ImportError):
            importlib.import_module(seeker)
    before = its_own()
    for key in before:
        del sys.modules[key]
    sys.modules.update(_loaded.get(name, {}))
    sys.path.insert(0, str(HOMES[name]))
    try:
        module = importlib.import_module(name)
        for part in parts:
            importlib.import_module(f"{name}.{part}")
        _loaded[name] = its_own()
        yield module
    finally:
        sys.path.remove(str(HOMES[name]))
        for key in its_own():
            del sys.modules[key]
        sys.modules.update(before)
