"""The commands themselves, as small as they go; they run the accelerator on real models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import stress, table
from sfast_ext import cli
from sfast_ext.tools import bench, demo, pipelines


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(bench.machine, "device", lambda: torch.device("cpu"))


def test_demo(tmp_path, capsys):
    arguments = [
        "demo",
        "--out",
        str(tmp_path),
        "--steps",
        "2",
        "--size",
        "64x64",
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert cli.main(arguments) == 0, capsys.readouterr().out
    result = json.loads((tmp_path / "r.json").read_text())
    rows = {row["what"]: row for row in result["rows"]}
    assert len(rows) >= 8 and not result["faults"]
    for name in ("LoRA, as AUTOMATIC1111", "LoRA, as SD.Next", "another checkpoint", "the first checkpoint again"):
        assert rows[name]["new_captures"] == 0 and rows[name]["changed"] > 10
    assert rows["first picture"]["new_captures"] == 1
    pictures = {
        name: np.asarray(Image.open(tmp_path / f"{name}.png")) for name in ("original", "accelerated", "difference")
    }
    assert {picture.shape for picture in pictures.values()} == {(64, 64, 3)}
    assert pictures["original"].std() > 10
    out = capsys.readouterr().out
    assert "amplified" in out and "group_norm" in out


def test_demo_with_a_folder_of_diffusers(tmp_path, monkeypatch, capsys):
    pipe = pipelines.random_pipeline(dtype=torch.float32, device=torch.device("cpu"))
    pipe.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("DEMO_MODEL", str(tmp_path / "model"))
    assert cli.main(["demo", "--out", str(tmp_path), "--steps", "1", "--size", "64x64"]) == 0, capsys.readouterr().out


def test_demo_tells_of_a_picture_that_differs(tmp_path, monkeypatch, capsys):
    wrong = iter(range(1000))
    difference = demo._difference
    monkeypatch.setattr(demo, "_difference", lambda a, b: 50.0 if next(wrong) == 1 else difference(a, b))
    assert cli.main(["demo", "--out", str(tmp_path), "--steps", "1", "--size", "64x64"]) == 1
    assert "FAULT another prompt: the pictures differ by 50.00 of 255" in capsys.readouterr().out


def test_amplified_difference(tmp_path):
    one = np.full((8, 8, 3), 0.5)
    assert demo.write_pictures(one, one + 0.004, tmp_path) == 100
    assert np.asarray(Image.open(tmp_path / "difference.png")).max() == 102
    assert demo.write_pictures(one, one, tmp_path) == 1


def test_bench(tmp_path, capsys):
    file = tmp_path / "deep" / "bench.json"
    arguments = [
        "bench",
        "--model",
        "tiny-sdxl",
        "--size",
        "64x64,72x64",
        "--against",
        "eager,cudagraph,eager-channels-last",
    ]
    assert cli.main([*arguments, "--iterations", "3", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert {"gpu", "driver", "torch", "triton", "cudnn", "commit"} <= set(result)
    assert [(row["width"], row["engine"]) for row in result["rows"]] == [
        (width, engine) for width in (64, 72) for engine in ("sfast", "eager", "eager-channels-last")
    ]
    for row in result["rows"]:
        assert row["model"] == "tiny-sdxl" and row["height"] == 64 and row["images"] == 1
        assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
        assert row["first_call_s"] > 0 and row["error_fp32"] < 1e-4
    assert result["rows"][0]["plan"]["fused"]["group_norm"] > 0
    assert "tiny-sdxl 72×64" in capsys.readouterr().out


def test_bench_says_where_an_engine_failed(monkeypatch, capsys):
    def fails(self, args, kwargs):
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(bench.engines.EagerChannelsLast, "start", fails)
    arguments = [
        "bench",
        "--model",
        "tiny-sd15",
        "--size",
        "64x64",
        "--against",
        "eager-channels-last",
        "--iterations",
        "1",
    ]
    assert cli.main(arguments) == 0
    assert "eager-channels-last: RuntimeError: no such thing" in capsys.readouterr().out


def test_bench_ends_badly_where_no_plan_ran(monkeypatch, capsys):
    monkeypatch.setattr(bench.engines.StableFast, "remark", lambda self: "the original forward ran: for a test")
    assert (
        cli.main(["bench", "--model", "tiny-sd15", "--size", "64x64", "--against", "eager", "--iterations", "1"]) == 1
    )
    assert "for a test" in capsys.readouterr().out


def test_bench_cold_measures_in_processes_of_their_own(tmp_path):
    file = tmp_path / "cold.json"
    arguments = ["bench", "--model", "tiny-sd15", "--size", "64x64", "--against", "", "--iterations", "1", "--cold"]
    assert cli.main([*arguments, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["cold"] and [row["engine"] for row in result["rows"]] == ["sfast"]


def test_stress(tmp_path, capsys):
    file = tmp_path / "stress.json"
    arguments = ["--tiny", "--lora", "6", "--sizes", "2", "--checkpoints", "4", "--json", str(file)]
    assert stress.main(arguments) == 0, capsys.readouterr().out
    result = json.loads(file.read_text())
    kinds = [event["kind"] for event in result["events"]]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "size": 4,
        "lora in place": 3,
        "lora replaced": 3,
        "checkpoint in place": 2,
        "checkpoint by the CPU": 2,
    }
    assert result["summary"]["captures_after_it"] == 0 and not result["faults"]
    assert result["summary"]["least_effect_of_a_lora"] > 0.05


def test_the_table_of_the_readme():
    row = {"model": "sd15", "width": 512, "height": 512, "images": 1}
    rows = [
        {**row, "engine": "sfast", "ms_p50": 8.0, "first_call_s": 4.21},
        {**row, "engine": "eager", "ms_p50": 24.6, "first_call_s": 0.1},
        {**row, "engine": "torch-compile", "failed": "no compiler", "ms_p50": None},
    ]
    lines = table.render([{"gpu": "NVIDIA H200", "rows": rows}]).splitlines()
    assert len(lines) == 3
    assert lines[2] == "| NVIDIA H200 | sd15, 512×512, batch 1 | 24.60 | – | – | 8.00 | 3.08 × | 4.2 |"
