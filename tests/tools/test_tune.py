"""The command that measures: its progress, its table, and what it does on a machine without a GPU."""

from __future__ import annotations

import pytest
import torch

from sfast_ext import cli, environment
from sfast_ext.kernels.backend import choices
from sfast_ext.kernels.backend.choices import OWN, Choice, Choices
from sfast_ext.tools import bench, measured, tune
from sfast_ext.tools.lib import engines, machine, models

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(choices, "_memories", {})


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(environment, "no_gpu", lambda: "torch finds no NVIDIA GPU")
    assert cli.main(["tune"]) == 1
    assert "torch finds no NVIDIA GPU" in capsys.readouterr().err


@pytest.fixture
def subject(monkeypatch):
    """Measures one shape for each size, on a CPU; the second size is interrupted if that is asked for."""
    made = Choices("sum", lambda run: {"own": 2.0, "other": 1.0}[run.__name__], lambda: True)
    stops: list[tuple[int, int]] = []
    stopped = []

    class Engine:
        def __init__(self, unet):
            pass

        def start(self, args, kwargs):
            if args in stops:
                raise KeyboardInterrupt

            def own():
                return torch.ones(1)

            def other():
                return torch.ones(1)

            with choices.measuring(0.0):  # as the builder of plans does
                made.run(CPU, f"{args[0]}x{args[1]}", own, {"other": other}, sure=True)

        def stop(self):
            stopped.append(1)

    monkeypatch.setattr(environment, "no_gpu", lambda: None)
    monkeypatch.setattr(machine, "device", lambda: CPU)
    monkeypatch.setattr(bench, "make_unet", lambda *args, **kwargs: None)
    monkeypatch.setattr(models, "unet_inputs", lambda unet, width, height, images, tokens: ((width, height), {}))
    monkeypatch.setattr(engines, "StableFast", Engine)
    return stops, stopped


def test_each_size_is_measured_whatever_is_known_from_other_cards(subject, capsys):
    assert cli.main(["tune", "--size", "512x512,768x768", "--batch", "1"]) == 0
    told = capsys.readouterr()
    assert "1 of 2: 512x512, 1 at once" in told.err and told.err.count("1 shapes measured") == 2
    assert "sum 512x512" in told.out and "other" in told.out and "2.00" in told.out
    assert subject[1] == [1, 1]


def test_what_was_measured_before_ctrl_c_is_kept(subject, capsys):
    subject[0].append((768, 768))
    assert cli.main(["tune", "--size", "512x512,768x768"]) == tune.INTERRUPTED
    told = capsys.readouterr()
    assert "what was measured is kept" in told.err and "sum 512x512" in told.out and subject[1] == [1, 1]
    choices._memories.clear()
    assert choices.memory_of(CPU).choices()["sum"] == {
        "512x512 of other": Choice("other", {OWN: 2.0, "other": 1.0}),
    }


def test_most_gained_stands_first_and_nothing_measured_is_said():
    found = {
        "attention": {
            "a of flash": Choice(OWN, {OWN: 1.0, "flash": 2.0}),
            "b of flash": Choice("flash", {OWN: 3.0, "flash": 1.0}),
        }
    }
    assert [row[:2] for row in measured.rows(found)] == [["attention b", "flash"], ["attention a", OWN]]
    assert list(measured.report({})) == ["Nothing is measured: there is one way for each operation here."]
