"""The benchmark of products of 8 bits: tables and the fit of the model; the times themselves need a Hopper GPU."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import hopper8
from sfast_ext.kernels.backend.triton_runtime import cdiv
from sfast_ext.kernels.eight_bits import wgmma_gemm8
from sfast_ext.tools.lib import machine

HEAD = {"gpu": "NVIDIA X", "driver": "1", "torch": "2.11", "cuda": "13.0", "commit": "abc", "multiprocessors": 132}


def microseconds(tile, epilogue, rows, columns, depth):
    waves = cdiv(wgmma_gemm8._tiles(rows, columns, tile, epilogue), 132 // tile.pair)
    return tile.begin + waves * (tile.start + tile.step * cdiv(depth, 128))


@pytest.fixture
def found():
    """Times as the model has them, as if all that is chosen were the first tile."""
    rows = []
    for epilogue, columns, depth in hopper8.SHAPES:
        for count in hopper8.ROWS:
            us = {hopper8.CUBLAS: 100.0}
            for kind in hopper8.KIND_NAMES.values():
                for tile in filter(lambda tile: wgmma_gemm8.fits(tile, epilogue), wgmma_gemm8.TILES):
                    us[f"{kind}, {hopper8.label(tile)}"] = microseconds(tile, epilogue, count, columns, depth)
            shape, chosen = [count, columns, depth], hopper8.label(wgmma_gemm8.TILES[0])
            rows.append({"what": hopper8.NAMES[epilogue], "shape": shape, "us": us, "chosen": chosen, "wrong": {}})
    return {**HEAD, "rows": rows}


def test_the_fit_finds_the_model_again(found):
    fitted = hopper8.fitted(found["rows"], 132)
    assert [tile[:3] for tile, _ in fitted] == [tile[:3] for tile in wgmma_gemm8.TILES]
    for (tile, error), wanted in zip(fitted, wgmma_gemm8.TILES):
        assert tile[3:] == pytest.approx(wanted[3:], rel=1e-6) and error < 1e-9
    for row in found["rows"][::2]:
        row["us"] = {name: 1.1 * us for name, us in row["us"].items()}
    assert all(0.01 < error < 0.11 for _, error in hopper8.fitted(found["rows"], 132))


def test_the_tables(found):
    row = found["rows"][0]
    for name in row["us"]:
        row["us"][name] = 100.0 if name == hopper8.CUBLAS else 80.0
    row["us"]["int8, 80 team 2 pair 1"] = 50.0
    lines = hopper8.table(found["rows"])
    assert len(lines) == 2 + len(found["rows"]) and len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| linear | 2048×3840×1280 | 100.0 | 50.0 | 80 team 2 pair 1 | 2.00 | 1.60 |")
    tiles = hopper8.tile_table(found["rows"])
    assert "50.0 / 80.0" in tiles[2] and "–" in tiles[2 + 3 * 2] and len({line.count("|") for line in tiles}) == 1


def test_the_report_names_what_is_wrong_and_what_is_reached(found, capsys, tmp_path):
    found["rows"][1]["wrong"] = {"int8, 80 team 2 pair 1": 0.5}
    file = tmp_path / "found.json"
    file.write_text(json.dumps(found), encoding="utf-8")
    assert hopper8.main(["--fit", str(file)]) == 0
    told = capsys.readouterr().out
    assert "WRONG, not timed: linear [4096, 3840, 1280]" in told and "NVIDIA X" in told
    assert f"of {len(found['rows'])} ≥ 1.6" in told and "Tile(160, 1, 2, " in told


def test_operands_are_quantised_by_rows():
    x = torch.randn(5, 64).half()
    x[2] *= 1000
    for kind in hopper8.KIND_NAMES:
        q, scale = hopper8.quantised(x, kind)
        assert q.dtype == kind and scale.shape == (5,)
        error = (q.float() * scale[:, None] - x.float()).norm(dim=1) / x.float().norm(dim=1)
        assert error.max() < (0.02 if kind == torch.int8 else 0.05)


def test_without_hopper_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(machine, "device", lambda: torch.device("cpu"))
    assert hopper8.main([]) == 1 and "Hopper" in capsys.readouterr().err
