"""Makes the WebUI's GPU one of SFAST_CARD_GIB GiB (`benchmarks/small_cards/card.py`) as soon as torch is imported, as
Forge asks how much memory there is before it loads extensions. Python runs this file where PYTHONPATH has its folder.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

CARD = Path(__file__).resolve().parents[2] / "small_cards" / "card.py"


class AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as often as it is looked for; when it was imported, the card is small."""

    card: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        if found is None or found.loader is None:
            return found
        load: Any = found.loader.exec_module

        def load_and_shrink(module: ModuleType) -> None:
            load(module)
            sys.meta_path.remove(self)
            self.shrink(module)

        found.loader.exec_module = load_and_shrink  # type: ignore[method-assign]
        return found

    def shrink(self, torch: Any) -> None:
        """From now on, to the end of the process."""
        if not torch.cuda.is_available():
            return
        spec = importlib.util.spec_from_file_location("sfast_small_card", CARD)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        AfterTorch.card = module.small_card(float(os.environ["SFAST_CARD_GIB"]))
        AfterTorch.card.__enter__()


if os.environ.get("SFAST_CARD_GIB"):
    sys.meta_path.insert(0, AfterTorch())
