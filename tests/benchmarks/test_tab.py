"""What `benchmarks.tab` keeps of a tiny model's images."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import tab


def test_plans_and_a_measurement_are_kept(tmp_path, monkeypatch, two_levels):
    pytest.importorskip("diffusers")
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "shown.json"
    given = ["--model", "tiny-sd15", "--sizes", "64x64", "--steps", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["tab", str(file), *given])
    tab.main()
    shown = json.loads(file.read_text(encoding="utf-8"))
    plans = [plan for each in shown["status"]["accelerators"] for plan in each["plans"]]
    assert "64x64, 1 image" in " ".join(plan["label"] for plan in plans)
    (measured,) = shown["measurements"]
    assert [row["size"] for row in measured["rows"]] == ["64x64"] and measured["rows"][0]["ms_before"] > 0
