"""What is told of 8 bits: why a machine has none, which layers of a model have them, and what `doctor` keeps of it."""

from __future__ import annotations

import json
import math

import pytest
import torch

from sfast_ext import cli, eight_bits, environment, last_start, reasons
from sfast_ext.kernels.backend import nvrtc, triton_runtime

KEPT = [["down_blocks.0.attentions.0.to_out", 0.031], ["mid_block.ff.net.2", 0.2]]


@pytest.fixture
def card(monkeypatch):
    """A GPU of a compute capability, as far as the refusal asks."""

    def pretend(capability: tuple[int, int], nvrtc_is_there: bool = True) -> None:
        monkeypatch.setattr(environment, "no_gpu", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(triton_runtime, "capability", lambda device: capability)
        monkeypatch.setattr(nvrtc, "supported", lambda device: nvrtc_is_there)
        monkeypatch.setattr(nvrtc, "unsupported", lambda device: None if nvrtc_is_there else "NVRTC was not found")

    return pretend


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_cards_that_can(card, capability):
    card(capability)
    assert eight_bits.refusal() is None


def test_a_card_before_turing_says_what_it_lacks(card):
    card((7, 0))
    found = eight_bits.refusal()
    assert found.code == "eight-bits" and "capability 7.0, and they take 7.5 or later" in str(found)


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_a_missing_nvrtc_is_said(card, capability):
    card(capability, nvrtc_is_there=False)
    assert "NVRTC was not found" in str(eight_bits.refusal())


def test_without_a_gpu_that_is_the_reason(monkeypatch):
    monkeypatch.setattr(environment, "no_gpu", reasons.ROCM)
    assert eight_bits.refusal() == reasons.ROCM()


def test_networks_are_summed_and_the_worst_layer_comes_first():
    unet = {"name": "unet", "eight_bits": {"layers": 400, "kept": KEPT, "bytes": 800 << 20}}
    other = {"name": "controlnet", "eight_bits": {"layers": 3, "kept": [("odd", math.nan)], "bytes": 1 << 20}}
    found = eight_bits.summary([unet, {"name": "VAE decoder"}, {"name": "refiner", "eight_bits": None}, other])
    assert (found["layers"], found["bytes"]) == (403, 801 << 20)
    assert [name for name, _ in found["kept"]] == ["odd", "mid_block.ff.net.2", "down_blocks.0.attentions.0.to_out"]
    assert eight_bits.summary([{"name": "unet"}]) == eight_bits.NONE


def test_a_summary_in_words():
    found = {"layers": 400, "kept": KEPT, "bytes": 800 << 20}
    said = eight_bits.lines(found)
    assert said == [
        "400 layers are computed in 8 bits, with 800 MB of GPU memory",
        "2 layers are kept in half precision, as 8 bits would change them too much:",
        "  down_blocks.0.attentions.0.to_out (by 3.1 %)",
        "  mid_block.ff.net.2 (by 20 %)",
    ]
    assert eight_bits.lines({**found, "kept": [["a", None]], "layers": 1})[1:] == [
        "1 layer is kept in half precision, as 8 bits would change it too much:", "  a (by an unknown amount)",
    ]  # fmt: skip
    assert eight_bits.lines(found, most=1)[-1] == "  and 1 more" and eight_bits.lines(eight_bits.NONE) == []


def test_doctor_tells_it_of_this_machine_and_of_the_last_image(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(last_start, "FOLDER", lambda: tmp_path / "cache")
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "\n8 bits\n" in out and "no image was made with them" in out
    kept = [[f"layer {n}", n / 100] for n in range(9)]
    eight_bits.keep({"layers": 7, "kept": kept, "bytes": 1 << 20})
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "7 layers are computed in 8 bits, with 1 MB" in out and "and 4 more" in out and "layer 8" not in out
    assert cli.main(["doctor", "--eight-bits"]) == 0
    assert "layer 8 (by 8 %)" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["eight_bits"]
    assert found["last"]["layers"] == 7 and (found["refused"] is None) == torch.cuda.is_available()


def test_a_file_that_is_none_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(last_start, "FOLDER", lambda: tmp_path / "cache")
    assert eight_bits.read() is None
    eight_bits.keep({"layers": 7})
    assert eight_bits.read() is None


CARDS = [(4, False), (5, True), (6, True), (8, True), (9.5, True), (10, False), (24, False)]


@pytest.mark.parametrize(("gib", "told"), CARDS)
def test_cards_for_which_8_bits_change_what_is_possible(gib, told):
    found = eight_bits.fits(int(gib * 2**30))
    assert (found is not None) == told
    assert not told or "SDXL fits this card in 8 bits" in str(found) and found.code == "eight-bits"


@pytest.mark.parametrize(("gib", "told"), [(1, False), (3, True), (4, False), (8, False)])
def test_smaller_models_on_smaller_cards(gib, told):
    assert (eight_bits.fits(int(gib * 2**30), 1_720_000_000, "the model") is not None) == told
