from __future__ import annotations

import sys

import pytest
import torch
from diffusers import UNet2DConditionModel

from benchmarks import host
from sfast_ext.tools import models


def test_the_stages_of_a_call_are_measured(monkeypatch, tmp_path, capsys):
    out = tmp_path / "host.json"
    arguments = ["host", "--models", "sd15", "--calls", "3", "--device", "cpu", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(host, "narrow_unet", lambda name: host.models.tiny_unet(name))
    host.main()
    printed = capsys.readouterr().out
    assert "before the launch" in printed and "behaviour once a generation" in printed
    assert '"watched weights"' in out.read_text()


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_a_narrow_unet_has_the_modules_of_the_real_one(name):
    with torch.device("meta"):
        real = UNet2DConditionModel(**models.unet_config(name))
    narrow = host.narrow_unet(name)
    assert [n for n, _ in narrow.named_parameters()] == [n for n, _ in real.named_parameters()]
    assert [type(m) for m in narrow.modules()] == [type(m) for m in real.modules()]
