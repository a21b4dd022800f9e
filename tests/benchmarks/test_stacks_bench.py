from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import stacks
from benchmarks.unet.run import Case
from sfast_ext.tools.lib.ways import OURS, Way

WANTED = Case("sd15", 512, 512, 1)


def row(way, ms, memory=100.0, digest="a", remark=None):
    return {**way.fields(), "ms_p50": ms, "memory_mb": memory, "digest": digest, "remark": remark}


@pytest.mark.long
def test_a_tiny_model(tmp_path, capsys, monkeypatch, two_levels):
    # the same on every machine
    monkeypatch.setattr(stacks.machine, "device", lambda: torch.device("cpu"))
    for name in ("xformers", "xformers.ops"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(stacks, "ROUNDS", 1)
    file = tmp_path / "deep" / "stacks.json"
    status = stacks.main(["--case", "tiny-sd15:64x64", "--iterations", "2", "--json", str(file)])
    result = json.loads(file.read_text())
    assert {"torch", "triton", "commit", "gpu"} <= set(result)
    rows = {str(stacks._way(r)): r for r in result["rows"]}
    assert list(rows)[0] == "sfast" and {"sfast, doggettx", "sfast, without Triton", "eager"} <= set(rows)
    measured = [r for r in rows.values() if "missing" not in r]
    assert all(r["ms_p50"] >= 0 and r["error"] < 1e-4 and not r.get("remark") for r in measured)
    # whatever the attention, the plan is that of SDPA
    digests = {r["digest"] for r in measured if r["engine"] == "sfast" and not r["without"]}
    assert len(digests) == 1 and None not in digests
    missing = [r for r in rows.values() if "missing" in r]
    assert [r["attention"] for r in missing] == ["xformers"] and "xformers" in missing[0]["missing"]
    assert "doggettx" in capsys.readouterr().out and status in (0, 1)


@pytest.mark.parametrize(
    ("other", "met"),
    [
        (row(Way("sfast", attention="v1"), 10.1), True),
        (row(Way("sfast", attention="v1"), 10.3), False),
        (row(Way("sfast", attention="v1"), 10.0, memory=103.0), False),
        (row(Way("sfast", attention="v1"), 10.0, digest="b"), False),
        (row(Way("sfast", attention="v1"), 10.0, remark="the original forward ran"), False),
    ],
)
def test_what_is_asked_of_an_attention(other, met):
    ((found, words),) = stacks.verdicts([row(OURS, 10.0), other], WANTED)
    assert found == met and words.startswith("v1: ")


@pytest.mark.parametrize(
    ("ms", "graph", "met"), [(9.2, 9.5, [True, True]), (9.4, 9.5, [True, False]), (9.2, 9.0, [False, True])]
)
def test_what_is_asked_without_triton(ms, graph, met):
    rows = [row(OURS, 4.0), row(stacks.WITHOUT, ms), row(Way("cudagraph"), graph)]
    assert [found for found, _ in stacks.verdicts(rows, WANTED)] == met


def test_ours_that_was_not_measured_meets_nothing():
    assert stacks.verdicts([{**OURS.fields(), "failed": "RuntimeError"}], WANTED) == [(False, "ours was not measured")]


def test_full_models_need_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(stacks.machine, "device", lambda: torch.device("cpu"))
    assert stacks.main(["--case", "sd15:512x512"]) == 1
    assert "need a GPU" in capsys.readouterr().err
