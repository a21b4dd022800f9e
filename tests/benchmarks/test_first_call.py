"""First calls in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import first_call
from sfast_ext.tools import bench


@pytest.mark.parametrize("slow, status", [(1.0, 0), (2.5, 1)])
def test_ways_and_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow: float, status: int) -> None:
    asked: list[tuple[bool, Path]] = []

    def in_process(options: bench.Options, case: bench.Case, caches: Path) -> dict[str, Any]:
        asked.append((options.ours.eight_bits, caches))
        return {"rows": [{"first_call_s": slow if options.ours.eight_bits else 0.5}]}

    monkeypatch.setattr(bench, "in_process", in_process)
    assert first_call.main(["--model", "tiny-sd15", "--size", "64", "--json", str(tmp_path / "x.json")]) == status
    assert [eight for eight, _ in asked] == [False, False, True, True]
    folders = [folder for _, folder in asked]
    # the second process of a way finds what the first has compiled, and no way what another has
    assert folders[0] == folders[1] and folders[2] == folders[3] and folders[0] != folders[2]
    assert json.loads((tmp_path / "x.json").read_text())["more"] == {"empty": slow - 0.5, "full": slow - 0.5}
