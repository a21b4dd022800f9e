"""The long run of benchmarks/fuzz/soak.py, for some seconds."""

from __future__ import annotations

import json

import pytest

from benchmarks.fuzz import soak
from benchmarks.fuzz.preview import Preview
from sfast_ext.weights.arena import WeightArena

BRIEF = ["--device", "cpu", "--model", "tiny", "--minutes", "0", "--calls", "70", "--every", "0"]


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    monkeypatch.setitem(soak.REQUESTS, "tiny", [(64, 64, 1, 77)])
    monkeypatch.setattr(soak, "LORAS", 2)
    monkeypatch.setattr(soak, "STEPS", (2, 4))


@pytest.mark.long
def test_a_run_of_which_nothing_is_wrong(tmp_path, capsys):
    file = tmp_path / "soak.json"
    assert soak.main([*BRIEF, "--json", str(file)]) == 0, capsys.readouterr().out
    result = json.loads(file.read_text())
    found = result["summary"]
    assert not result["faults"] and found["calls"] >= 70 and set(found["changes"]) == set(soak.KINDS)
    assert found["calls_on_plans"] > 30 and found["compared_to_the_bit"] > 20 and found["previews"] > 0
    assert found["worst_error"] < 1e-4 < found["least_effect_of_other_weights"]
    assert found["memory"]["host_mb"]["end"] > 0 and len(result["timeline"]) > 2


def test_stale_weights_are_seen(monkeypatch, capsys):
    monkeypatch.setattr(WeightArena, "sync", lambda self: 0)
    assert soak.main(BRIEF) == 1
    said = capsys.readouterr().out
    assert "FAULT call" in said and "0.02 is allowed" in said


def test_growing_memory_is_seen():
    flat = [{"host_mb": 500.0 + i % 3} for i in range(10)]
    seen = soak.growth(flat, "host_mb")
    assert seen["median of the last quarter"] <= seen["median of the first quarter"] + 1 and seen["most"] == 502.0
    # one look between two graphs is no growth, a slope is
    assert soak.growth([*flat, {"host_mb": 900.0}, *flat], "host_mb")["median of the last quarter"] < 503
    slope = soak.growth([{"host_mb": 500.0 + 10 * i} for i in range(12)], "host_mb")
    assert slope["median of the last quarter"] > slope["median of the first quarter"] + 80
    assert soak.growth([{"host_mb": None}], "host_mb") is None


def test_a_preview_that_changes_is_seen(monkeypatch):
    preview = Preview(soak.torch.device("cpu"), channels=8, size=8, pause=0.001)
    right = preview.decode
    monkeypatch.setattr(preview, "decode", lambda: right() * (1 + (preview.images > 2)))
    with preview:
        while not preview.faults and preview.is_alive():
            preview.join(0.01)
    assert "differs from the first" in preview.faults[0]
