"""The benchmark of the VAE, with a tiny one on a CPU."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from benchmarks.vae import run
from sfast_ext.tools.lib import machine

CASES = ["--model", "tiny-sd", "--case", "decoder:64x48:float32", "--case", "encoder:64x48:float32"]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(machine, "device", lambda: torch.device("cpu"))


def test_ours_is_measured_beside_eager_and_computes_the_same(tmp_path):
    file = tmp_path / "vae.json"
    assert run.main([*CASES, "--ways", "sfast,eager", "--iterations", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(row["part"], row["way"]) for row in rows] == [
        ("decoder", "sfast"), ("decoder", "eager"), ("encoder", "sfast"), ("encoder", "eager"),
    ]  # fmt: skip
    for row in rows:
        assert row["error"] < 1e-5 and row["ms_p50"] > 0 and row["flops"] > 0
    assert rows[0]["plan"]["replays"] > 0 and rows[0]["plan"]["fused"]["packed_linear"] == 1


def test_torch_compile_is_left_out_once_time_is_up(capsys):
    assert run.main([*CASES[:4], "--ways", "torch-compile,eager", "--iterations", "1", "--seconds", "-1"]) == 0
    printed = capsys.readouterr().out
    assert "eager" in printed and "torch-compile" not in printed


def test_a_way_that_fails_is_named_and_the_others_are_kept(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("no plan today")

    monkeypatch.setattr(run, "accelerate", lambda *args: broken())
    assert run.main([*CASES[:4], "--ways", "sfast,eager", "--iterations", "1"]) == 1
    printed = capsys.readouterr().out
    assert "no plan today" in printed and "eager" in printed


def test_a_case_is_a_part_a_size_and_a_dtype():
    assert run.case("decoder:512x768:bfloat16") == run.Case("decoder", 512, 768, "bfloat16")
    for wrong in ("unet:512x512:float16", "decoder:512x512:int8"):
        with pytest.raises(argparse.ArgumentTypeError):
            run.case(wrong)
