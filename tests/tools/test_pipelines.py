"""Pipelines: what the trained one draws, and the kinds of random ones."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from sfast_ext.tools.lib import models, pipelines
from sfast_ext.tools.lib.pipelines import DIGITS

CPU = torch.device("cpu")


def image(pipe, prompt, **options):
    pipe.set_progress_bar_config(disable=True)
    options = {"width": 128, "height": 128, "num_inference_steps": 6, **options}
    return pipe(prompt, generator=torch.Generator().manual_seed(0), output_type="np", **options).images[0]


def test_the_trained_pipeline_writes_the_digit_that_it_is_told():
    pipe, name, prompts = pipelines.chosen(None, dtype=torch.float32, device=CPU)
    assert prompts == DIGITS and "digits" in name
    zero, three, seven = ((image(pipe, DIGITS[digit]) < 0.5).all(-1) for digit in (0, 3, 7))
    # ink in the middle, but in the ring of a zero
    assert not zero[52:76, 56:72].any() and three[52:76, 40:88].any()
    assert all(0.04 < digit.mean() < 0.4 for digit in (zero, three, seven))
    # below its middle a seven has ink on the left alone, a three on the right
    assert three[72:104, 64:].sum() > 2 * three[72:104, :48].sum()
    assert seven[72:104, :80].sum() > 2 * seven[72:104, 80:].sum()


def test_what_was_trained_is_read_again(tmp_path, monkeypatch):
    pipe = pipelines.random_pipeline(seed=5, dtype=torch.float32, device=CPU)
    monkeypatch.setattr(pipelines, "TRAINED", tmp_path / "weights.safetensors")
    pipelines.save_trained(pipe, pipelines.TRAINED)
    again = pipelines.trained_pipeline(dtype=torch.float32, device=CPU)
    for part in ("unet", "vae", "text_encoder"):
        theirs, own = (dict(getattr(each, part).named_parameters()) for each in (again, pipe))
        assert all(torch.equal(theirs[key], value.half().float()) for key, value in own.items())
    # as each version of transformers names them
    assert not any("text_model" in name for name in load_file(pipelines.TRAINED))


@pytest.mark.parametrize("name", ["tiny-sd21", "tiny-sdxl"])
def test_random_pipelines(name, two_levels):
    pipe = pipelines.random_pipeline(name, dtype=torch.float32, device=CPU)
    drawn = image(pipe, "anything", width=64, height=72, num_inference_steps=1)
    assert drawn.shape == (72, 64, 3)
    assert pipe.unet.config.cross_attention_dim == models.unet_config(name)["cross_attention_dim"]


def test_a_folder_of_sdxl_is_read_as_it_was_written(tmp_path, two_levels):
    pipe = pipelines.random_pipeline("tiny-sdxl", dtype=torch.float32, device=CPU)
    pipe.save_pretrained(tmp_path)
    again = pipelines.load_pipeline(str(tmp_path), dtype=torch.float32, device=CPU)
    one, other = (image(each, "anything", width=64, height=64, num_inference_steps=1) for each in (pipe, again))
    assert abs(one - other).max() < 1e-5 < one.std()
