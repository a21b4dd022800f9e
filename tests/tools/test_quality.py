"""The command `quality`: what it measures, what it calls a fault, and that it changes nothing of the model."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from sfast_ext import cli
from sfast_ext.tools import quality
from sfast_ext.tools.lib import contact_sheet, likeness, pipelines
from sfast_ext.tools.quality import Row, Series

SMALL = ["quality", "--images", "2", "--steps", "2", "--size", "64x64"]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(quality.machine, "device", lambda: torch.device("cpu"))
    for found in (likeness._structural, likeness._learned):
        found.cache_clear()
    yield
    for found in (likeness._structural, likeness._learned):
        found.cache_clear()


def run(tmp_path, *more: str) -> int:
    return cli.main([*SMALL, "--out", str(tmp_path), "--json", str(tmp_path / "r.json"), *more])


@pytest.mark.long
def test_images_of_digits(tmp_path, capsys):
    assert run(tmp_path) == 0, capsys.readouterr().out
    told = json.loads((tmp_path / "r.json").read_text())
    assert [row["seed"] for row in told["rows"]] == [0, 1] and not told["faults"]
    for row in told["rows"]:
        # in float32, and rounded differently: neither equal nor seen
        assert 100 < row["accelerated"]["psnr"] < likeness.HIGHEST > row["yardstick"]["psnr"] > 100
    # five images and their labels
    assert Image.open(tmp_path / "sheet.png").size == (5 * 100 + 4, 16 + 2 * 84 + 4)
    out = capsys.readouterr().out
    assert "doggettx" in out and "median" in out and "not accelerated" not in out


@pytest.mark.long
def test_lossy_ways_are_compared_in_the_same_sheet(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quality, "lossy_here", lambda: (["faster_sums", "eight_bits"], []))
    own, asked = Series.accelerated, []

    def changed(series, device, **lossy):
        asked.append(lossy)
        made, bypassed = own(series, device, **lossy)
        return [image * (0.98 if lossy else 1) for image in made], bypassed

    monkeypatch.setattr(Series, "accelerated", changed)
    # what they change is no fault
    assert run(tmp_path) == 0, capsys.readouterr().out
    assert asked == [{}, {"faster_sums": True}, {"eight_bits": True}]
    told = json.loads((tmp_path / "r.json").read_text())
    for row in told["rows"]:
        assert set(row["lossy"]) == {"half-precision sums", "8 bits"}
        assert all(each["psnr"] < 60 for each in row["lossy"].values()) and row["accelerated"]["psnr"] > 100
    assert Image.open(tmp_path / "sheet.png").size[0] == 9 * 100 + 4
    out = capsys.readouterr().out
    table = out.partition("lowest PSNR")[2]
    for name in ("accelerated", "half-precision sums", "8 bits", "original, doggettx"):
        assert name in table
    asked.clear()
    assert run(tmp_path, "--no-lossy") == 0 and asked == [{}]
    assert "not compared" not in capsys.readouterr().out


@pytest.mark.long
def test_a_lossy_way_that_fails_is_a_fault(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quality, "lossy_here", lambda: (["eight_bits"], []))
    own = Series.accelerated

    def broken(series, device, **lossy):
        made, bypassed = own(series, device, **lossy)
        if not lossy:
            return made, bypassed
        return [image * np.nan for image in made], {"UNet": "was not accelerated"}

    monkeypatch.setattr(Series, "accelerated", broken)
    assert run(tmp_path) == 1
    out = capsys.readouterr().out
    assert "seed 1 with 8 bits: a value is not finite" in out and "the UNet with 8 bits was not accelerated" in out


def test_what_this_machine_has_of_them(monkeypatch):
    monkeypatch.setattr(quality.environment, "sums_in_half", lambda: True)
    monkeypatch.setattr(quality.eight_bits, "refusal", lambda: None)
    assert quality.lossy_here() == (["faster_sums", "eight_bits"], [])
    monkeypatch.setattr(quality.eight_bits, "refusal", lambda: "no NVRTC")
    fields, why = quality.lossy_here()
    assert fields == ["faster_sums"] and why == ["8 bits: not compared, no NVRTC"]
    monkeypatch.undo()
    if not torch.cuda.is_available():
        assert quality.lossy_here()[0] == [] and len(quality.lossy_here()[1]) == 2


def test_a_wrong_image_is_a_fault(tmp_path, monkeypatch, capsys):
    own = Series.accelerated

    def wrong(series, device, **lossy):
        images, bypassed = own(series, device, **lossy)
        return [image * 0.98 for image in images], bypassed

    monkeypatch.setattr(Series, "accelerated", wrong)
    assert run(tmp_path) == 1
    assert "the images differ more than with another attention" in capsys.readouterr().out


def test_a_unet_that_is_not_accelerated_is_a_fault(tmp_path, monkeypatch, capsys):
    accelerate = quality.accelerate
    monkeypatch.setattr(quality, "accelerate", lambda module, config: accelerate(module, quality.Config()))
    assert run(tmp_path) == 1
    assert "the UNet was not accelerated" in capsys.readouterr().out


def test_what_cannot_be_had_is_told_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Series, "images", lambda series: pytest.fail("an image was made"))
    monkeypatch.setitem(sys.modules, "xformers", None)
    assert run(tmp_path, "--yardstick", "xformers") == 2
    assert "xformers cannot be imported" in capsys.readouterr().err
    (tmp_path / "prompts").write_text("\n \n")
    assert run(tmp_path, "--prompts", str(tmp_path / "prompts")) == 2
    assert "has no prompts" in capsys.readouterr().err


@pytest.mark.parametrize("images", ["0", "-1", "two"])
def test_a_number_of_images_that_is_none(images, capsys):
    with pytest.raises(SystemExit):
        cli.main(["quality", "--images", images])
    assert "must be a whole number from 1" in capsys.readouterr().err


def test_prompts_of_a_file_in_turns(tmp_path, monkeypatch):
    (tmp_path / "prompts").write_text("one\n\ntwo\n")
    assert quality._prompts(tmp_path / "prompts", quality.PROMPTS) == ["one", "two"]
    series = Series(None, ["one", "two"], 3, 2, (64, 64), lambda: None)
    assert series.jobs == [(0, "one"), (1, "two"), (2, "one")]


def test_the_model_is_as_it_was():
    pipe = pipelines.chosen(None, dtype=torch.float32, device=torch.device("cpu")).pipe
    pipe.set_progress_bar_config(disable=True)
    own, state = dict(pipe.unet.attn_processors), {k: v.clone() for k, v in pipe.unet.state_dict().items()}
    series = Series(pipe, ["a"], 1, 2, (64, 64), lambda: None)
    before = series.images()
    other = series.with_attention("plain")
    assert pipe.unet.attn_processors == own
    ours, bypassed = series.accelerated(torch.device("cpu"))
    assert not bypassed and "forward" not in vars(pipe.unet) and "forward" not in vars(pipe.vae.decoder)
    assert all(torch.equal(state[k], v) for k, v in pipe.unet.state_dict().items())
    assert np.array_equal(series.images()[0], before[0])
    assert not np.array_equal(ours[0], before[0]) and not np.array_equal(other[0], before[0])


def row(accelerated: float, yardstick: float) -> Row:
    return Row(0, "", *(likeness.Likeness(each, None, None) for each in (accelerated, yardstick)))


@pytest.mark.parametrize(
    ("ours", "theirs", "faulty"),
    [(40, 42, False), (40, 44, True), (61, 120, False), (58, 120, True), (-math.inf, 30, True), (200, 200, False)],
)
def test_what_is_worse_than_the_yardstick(ours, theirs, faulty):
    assert bool(quality.faults([row(ours, theirs)])) == faulty
    # one of many may be worse
    some = [row(40, 40)] * 4 + [row(ours, theirs)]
    assert bool(quality.faults(some)) == (ours == -math.inf)


@pytest.mark.parametrize(
    ("ours", "theirs", "faulty"), [(50, 52, False), (50, 54, True), (61, 80, False), (70, 40, False)]
)
def test_where_there_are_exact_images_they_are_what_counts(ours, theirs, faulty):
    far = row(40, 60)
    far.exact = likeness.Likeness(theirs, None, None), likeness.Likeness(ours, None, None)
    found = quality.faults([far])
    assert bool(found) == faulty
    assert not found or "farther from exact ones than the original's" in found[0]
    assert "original to exact" in quality.report([far], "plain")


def test_exact_images(tmp_path, monkeypatch, capsys):
    scale = pipelines.Scale(torch.bfloat16, 2, (64, 64))
    monkeypatch.setattr(pipelines, "scale", lambda device, steps, size: scale)
    assert run(tmp_path, "--exact", "--images", "1") == 0, capsys.readouterr().out
    (told,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    # rounded to bfloat16 in each, and differently
    assert all(20 < each["psnr"] < 80 for each in told["exact"])
    assert told["exact"][0] != told["exact"][1]
    assert "original to exact" in capsys.readouterr().out


def test_exact_images_are_of_half_precision(tmp_path, capsys):
    assert run(tmp_path, "--exact", "--images", "1") == 2
    assert "--exact makes images in float32, as all are on a CPU" in capsys.readouterr().err


def test_weights_are_the_same_after_exact_images():
    pipe = pipelines.random_pipeline(dtype=torch.float16, device=torch.device("cpu"))
    pipe.set_progress_bar_config(disable=True)
    before = {key: value.clone() for key, value in pipe.unet.state_dict().items()}
    series = Series(pipe, ["a"], 1, 2, (64, 64), lambda: None)
    images = []
    own = Series.image
    series.image = lambda *job: images.append(pipe.vae.dtype) or own(series, *job)
    (exact,) = series.exact()
    assert images == [torch.float32] and np.isfinite(exact).all()
    assert pipe.unet.dtype == pipe.vae.dtype == torch.float16
    assert all(torch.equal(before[key], value) for key, value in pipe.unet.state_dict().items())
    # the noise is that of the model's own arithmetic
    again = Series(pipe, ["a"], 1, 2, (64, 64), lambda: None).exact()[0]
    assert np.array_equal(exact, again)


def test_likeness():
    image = np.random.default_rng(0).random((16, 24, 3))
    same = likeness.likeness(image, image)
    assert same.psnr == likeness.HIGHEST and same.ssim in (None, pytest.approx(1))
    flat = np.full((16, 24, 3), 0.5)
    assert likeness.likeness(flat, flat + 0.1).psnr == pytest.approx(20)
    assert likeness.likeness(flat, flat * np.nan).psnr == -math.inf
    # too small for the window
    assert likeness.likeness(flat[:6], flat[:6]).ssim is None


def test_without_the_packages_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "skimage.metrics", None)
    monkeypatch.setitem(sys.modules, "lpips", None)
    flat = np.full((8, 8, 3), 0.5)
    assert likeness.likeness(flat, flat) == likeness.Likeness(likeness.HIGHEST, None, None)
    said = likeness.missing()
    assert ["scikit-image" in said[0], "lpips" in said[1], len(said)] == [True, True, 2]


def test_ssim_and_lpips_if_they_are(monkeypatch):
    given = []

    class Network:
        def eval(self):
            return self

        def requires_grad_(self, wanted):
            return self

        def __call__(self, a, b):
            given.append((a, b))
            return torch.tensor([[[[0.25]]]])

    monkeypatch.setitem(sys.modules, "lpips", SimpleNamespace(LPIPS=lambda net, verbose: Network()))
    metrics = SimpleNamespace(structural_similarity=lambda a, b, channel_axis, data_range: 0.5)
    monkeypatch.setitem(sys.modules, "skimage.metrics", metrics)
    a, b = np.zeros((8, 12, 3)), np.ones((8, 12, 3))
    assert likeness.likeness(a, b) == likeness.Likeness(pytest.approx(0), 0.5, 0.25) and not likeness.missing()
    # what the network takes: from -1 to 1
    (x, y) = given[0]
    assert x.shape == (1, 3, 8, 12) and x.eq(-1).all() and y.eq(1).all() and x.dtype == torch.float32


def test_a_difference_is_amplified_to_be_seen():
    a = np.zeros((4, 4, 3))
    seen, factor = contact_sheet.difference(a, a + 0.004)
    assert factor == 100 and seen.max() == pytest.approx(0.4)
    assert contact_sheet.difference(a, a)[1] == 1
    assert contact_sheet.difference(a, a * np.nan)[0].max() == 1


def test_large_images_are_made_smaller():
    images = [np.zeros((512, 768, 3))] * 2
    assert contact_sheet.sheet(("a", "b"), [(images, ("x", "y"))]).size == (2 * 260 + 4, 16 + 171 + 16 + 4 + 4)
