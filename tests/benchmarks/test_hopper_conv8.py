"""The benchmark of convolutions of 8 bits: the table and the fit of the model; the times need a Hopper GPU."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import hopper_conv8
from sfast_ext.kernels.eight_bits import wgmma_conv8

HEAD = {"gpu": "NVIDIA X", "driver": "1", "torch": "2.11", "cuda": "13.0", "commit": "abc", "multiprocessors": 132}


def test_the_fit_finds_the_model_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(wgmma_conv8, "multiprocessors", lambda device: 132)
    rows = []
    for channels, size, columns in hopper_conv8.SHAPES:
        x = torch.empty((2, channels, size, size), device="meta")
        us = dict.fromkeys((hopper_conv8.CUDNN, hopper_conv8.HALF, hopper_conv8.NORM, hopper_conv8.NORM8), 100.0)
        fitting = [tile for tile in wgmma_conv8.TILES if wgmma_conv8.fits(x, columns, tile)]
        us |= {hopper_conv8.label(tile): wgmma_conv8.microseconds(x, columns, tile) for tile in fitting}
        chosen = hopper_conv8.label(wgmma_conv8.tiles(x, columns)[0])
        rows.append({"shape": [channels, size, columns], "us": us, "chosen": chosen, "wrong": {}})
    for tile, error in hopper_conv8.fitted(rows, 132):
        wanted = next(each for each in wgmma_conv8.TILES if each[:4] == tile[:4])
        assert error < 1e-9 and tile.step == pytest.approx(wanted.step)
    lines = hopper_conv8.table(rows)
    assert len(lines) == 2 + len(rows) and len({line.count("|") for line in lines}) == 1
    assert all(line.endswith("| 1.00 |") for line in lines[2:])
    rows[0]["wrong"] = {"tile 80": 0.5}
    file = tmp_path / "found.json"
    file.write_text(json.dumps({**HEAD, "rows": rows}), encoding="utf-8")
    assert hopper_conv8.main(["--fit", str(file)]) == 0
    told = capsys.readouterr().out
    assert "NVIDIA X" in told and "Tile(160, True, 1, 2, " in told and "WRONG, not timed: [320, 128, 320]" in told


def test_labels_differ():
    assert len({hopper_conv8.label(tile) for tile in wgmma_conv8.TILES}) == len(wgmma_conv8.TILES)
