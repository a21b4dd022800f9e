"""Transformers of random weights for the commands, and a measurement of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_net import no_gradients  # noqa: F401

from sfast_ext import cli
from sfast_ext.tools.lib import Unavailable, exact, models, names, transformers
from sfast_ext.tools.lib.ways import Way

KINDS = [name for name in names.TRANSFORMERS if transformers.available(name)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_and_no_weight_is_zero(kind: str) -> None:
    one, same, other = (transformers.random_transformer(f"tiny-{kind}", seed) for seed in (1, 1, 2))
    weights = [dict(model.named_parameters()) for model in (one, same, other)]
    assert all(torch.equal(w, weights[1][name]) and bool(w.all()) for name, w in weights[0].items())
    assert not any(torch.equal(w, weights[2][name]) for name, w in weights[0].items())
    args, kwargs = transformers.inputs_of(one, 64, 96, 2, tokens=9)
    result = transformers.result_of(one(*args, **kwargs))
    assert result.shape[0] == 2 and bool(result.isfinite().all())
    assert torch.equal(result, transformers.result_of(same(*args, **kwargs)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_in_fp32_is_that_of_the_model(kind: str) -> None:
    model = transformers.random_transformer(f"tiny-{kind}")
    args, kwargs = transformers.inputs_of(model, 64, 64, 1, tokens=7)
    expected = transformers.result_of(model(*args, **kwargs))
    torch.testing.assert_close(exact.Exact(model)(args, kwargs), expected)


def test_unets_are_no_transformers() -> None:
    unet = models.tiny_unet()
    assert transformers.kind_of(unet) is None and not transformers.is_transformer("sdxl")
    args, kwargs = transformers.inputs_of(unet, 64, 64, 1, tokens=7)
    assert args[0].shape == (2, 4, 8, 8) and kwargs["encoder_hidden_states"].shape[1] == 7


def test_names_are_known() -> None:
    assert all(transformers.is_transformer(name) for name in (*names.TRANSFORMERS, *names.TINY_TRANSFORMERS))
    assert {*names.TRANSFORMERS, *names.TINY_TRANSFORMERS} < {*names.ALL}


def test_a_transformer_has_its_own_attention() -> None:
    model: Any = transformers.random_transformer(f"tiny-{KINDS[0]}")
    assert Way("eager").model(model) is model
    with pytest.raises(Unavailable, match="its own attention"):
        Way("eager", "sliced").model(model)


def test_bench_measures_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    command = ["bench", "--model", "tiny-z-image", "--size", "64x64", "--against", "eager", "--iterations", "2"]
    assert cli.main([*command, "--json", str(file)]) == 0
    rows = {row["engine"]: row for row in json.loads(file.read_text(encoding="utf-8"))["rows"]}
    assert rows["sfast"]["error_fp32"] < 1e-4 and "remark" not in rows["sfast"] and rows["eager"]["ms_p50"] > 0
    assert "tiny-z-image" in capsys.readouterr().out
