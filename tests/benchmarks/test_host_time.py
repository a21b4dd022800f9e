from __future__ import annotations

import json
import sys

import pytest
import torch
from diffusers import UNet2DConditionModel

from benchmarks import host
from sfast_ext.tools.lib import models


@pytest.mark.long
def test_the_stages_of_a_call_are_measured(monkeypatch, tmp_path, capsys):
    out = tmp_path / "host.json"
    arguments = ["host", "--models", "sd15", "--calls", "3", "--device", "cpu", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(host, "narrow_unet", lambda name: host.models.tiny_unet(name))
    host.main()
    printed = capsys.readouterr().out
    assert "before the launch" in printed and "behaviour once a generation" in printed
    found = json.loads(out.read_text())["sd15"]
    assert found["watched weights"]
    in_a_call = [list(stages) for name, stages in found.items() if name.endswith("by stages")]
    assert len(in_a_call) == 3 and all(host.THE_LAUNCH in names for names in in_a_call)
    before = [name for name in in_a_call[0] if name.startswith("before")]
    assert before[0] == "before: into the accelerator" and before[-1] == "before: copies in"


def test_the_stages_in_a_call_add_up():
    line = host.Timeline()
    marks = zip(["a", "b", "a", host.THE_LAUNCH, "b", "end"], [0.0, 1.0, 3.0, 6.0, 10.0, 15.0])
    line.marks = list(marks)
    assert line.stages() == {"before: a": 4.0, "before: b": 2.0, host.THE_LAUNCH: 4.0, "after: b": 5.0}


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_a_narrow_unet_has_the_modules_of_the_real_one(name):
    with torch.device("meta"):
        real = UNet2DConditionModel(**models.unet_config(name))
    narrow = host.narrow_unet(name)
    assert [n for n, _ in narrow.named_parameters()] == [n for n, _ in real.named_parameters()]
    assert [type(m) for m in narrow.modules()] == [type(m) for m in real.modules()]
