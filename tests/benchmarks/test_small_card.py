"""A WebUI's GPU passes for a small one from the import of torch on: with something in torch's place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.small_cards.card import usable
from benchmarks.webui.hosts import SMALL_CARD

TORCH = """
import types

asked = []
memory = types.SimpleNamespace(mem_get_info=lambda device=None: (140 << 30, 140 << 30))
cuda = types.SimpleNamespace(
    is_available=lambda: {available},
    memory=memory,
    mem_get_info=memory.mem_get_info,
    memory_reserved=lambda device=None: 1 << 30,
    current_device=lambda: 0,
    get_device_properties=lambda device=None: types.SimpleNamespace(total_memory=140 << 30, major=9),
    set_per_process_memory_fraction=asked.append,
)
"""
TELL = """
import importlib.util

assert importlib.util.find_spec("torch") is not None  # which WebUIs ask before they import it
import torch

properties = torch.cuda.get_device_properties()
print(*torch.cuda.mem_get_info(), torch.cuda.memory.mem_get_info()[1], properties.total_memory, properties.major)
print(*torch.asked)
"""


def told(tmp_path: Path, card: str, available: bool = True) -> list[str]:
    (tmp_path / "torch.py").write_text(TORCH.replace("{available}", str(available)), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(SMALL_CARD), str(tmp_path))), "SFAST_CARD_GIB": card}
    ran = subprocess.run([sys.executable, "-c", TELL], env=env, capture_output=True, text=True, timeout=60, check=True)
    return ran.stdout.splitlines()


def test_whoever_asks_is_told_of_a_small_card(tmp_path: Path):
    total = usable(8)
    memory, fraction = told(tmp_path, "8")
    assert memory == f"{total - (1 << 30)} {total} {total} {total} 9"
    assert float(fraction) == pytest.approx(total / (140 << 30))


@pytest.mark.parametrize(("card", "available"), [("", True), ("8", False)])
def test_nothing_changes_without_a_card_or_without_a_gpu(card: str, available: bool, tmp_path: Path):
    memory, asked = told(tmp_path, card, available)
    assert memory == f"{140 << 30} {140 << 30} {140 << 30} {140 << 30} 9" and asked == ""
