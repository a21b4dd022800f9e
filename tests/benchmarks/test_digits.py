"""Digits: how images become latents and latents images, what a model is told of them, and the training."""

from __future__ import annotations

import gzip
import importlib.util
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import digits
from sfast_ext.tools.lib import pipelines

CPU = torch.device("cpu")


@pytest.fixture
def strokes(monkeypatch):
    """In the place of scikit-learn's images: digit n is ink in its n-th row, or everywhere."""
    images = -torch.ones(40, 1, 8, 8)
    shown = torch.arange(40) % 10
    for number, digit in enumerate(shown.tolist()):
        images[number, 0, digit if digit < 8 else slice(None)] = 1
    monkeypatch.setattr(digits, "load", lambda: (images, shown))


def test_the_file_of_scikit_learn(tmp_path, monkeypatch):
    folder = tmp_path / "datasets" / "data"
    folder.mkdir(parents=True)
    with gzip.open(folder / "digits.csv.gz", "wt") as file:
        file.writelines(",".join(["16"] + ["0"] * 63 + [str(digit)]) + "\n" for digit in (7, 1))
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    images, shown = digits.load()
    assert shown.tolist() == [7, 1] and images.shape == (2, 1, 8, 8)
    assert images[0, 0, 0, 0] == 1 and images.sum() == 2 - 2 * 63
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install scikit-learn"):
        digits.load()


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [(16, 16, (16, (1, 1))), (8, 24, (8, (1, 3))), (64, 64, (16, (4, 4))), (24, 8, (8, (3, 1)))],
)
def test_cells(height, width, expected):
    assert digits.cells(height, width) == expected


def test_each_cell_has_an_image_of_its_own_in_reading_order(strokes):
    chosen = digits.Digits(CPU).written(torch.tensor([2, 9]), 8)
    assert chosen.shape == (2, 8, 8, 8) and (chosen[0, :, 2] == 1).all() and (chosen[1] == 1).all()
    four = -torch.ones(1, 8, 8, 8)
    four[0, 5] = 1
    latent = digits.latents(four, 32, 64)
    assert latent.shape == (1, 4, 32, 64) and torch.equal(latent[:, 0], -latent[:, 1])
    ink = (digits.drawn(latent).mean(1) < 0)[0]
    assert ink.shape == (256, 512) and ink[192, 192] and ink[128:, 128:256].sum() == ink.sum() > 8000


def test_what_the_unet_is_told(two_levels):
    sd15 = pipelines.random_pipeline("tiny-sd15", dtype=torch.float32, device=CPU)
    told = digits.Conditions(sd15, CPU).of(torch.tensor([3, 3, 10]), 8, 16)["encoder_hidden_states"]
    assert torch.equal(told[0], told[1]) and not torch.equal(told[0], told[2])
    sdxl = pipelines.random_pipeline("tiny-sdxl", dtype=torch.float32, device=CPU)
    added = digits.Conditions(sdxl, CPU).of(torch.tensor([3, 10]), 8, 16)["added_cond_kwargs"]
    assert added["time_ids"].tolist() == [[64, 128, 0, 0, 64, 128]] * 2
    assert not torch.equal(*added["text_embeds"])


def test_training_leaves_the_average_of_what_fits():
    torch.manual_seed(0)
    module, goal = torch.nn.Linear(4, 1), torch.tensor([1.0, -2.0, 3.0, 0.5])

    def losses():
        while True:
            x = torch.randn(64, 4)
            yield (module(x)[:, 0] - x @ goal).square().mean()

    seen = digits.train(module, losses(), 0.05, 0, steps=600)
    assert len(seen) == 600 and seen[0] > 5 and not module.weight.requires_grad and not module.training
    assert (module.weight[0] - goal).abs().max() < 0.02


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("name", ["tiny-sd15", "tiny-sdxl"])
def test_a_folder_with_prompts(name, strokes, monkeypatch, tmp_path, two_levels):
    monkeypatch.setattr(digits.machine, "device", lambda: CPU)
    assert digits.main(["--model", name, "--steps", "2", "--batch", "2", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "prompts.txt").read_text().splitlines() == list(pipelines.DIGITS)
    pipe = pipelines.load_pipeline(str(tmp_path), dtype=torch.float32, device=CPU)
    assert all(torch.isfinite(value).all() for value in pipe.unet.state_dict().values())


def test_a_single_file(strokes, monkeypatch, tmp_path, two_levels):
    monkeypatch.setattr(digits.machine, "device", lambda: CPU)
    file = tmp_path / "digits.safetensors"
    assert digits.main(["--steps", "1", "--batch", "1", "--out", str(file)]) == 0
    assert {key.partition(".")[0] for key in load_file(file)} == {"unet", "vae", "text_encoder"}
