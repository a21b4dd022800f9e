from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import eight_bits_error as benchmark

pytest.importorskip("diffusers")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "BLOCKS", {"block": (128, 2)})
    monkeypatch.setattr(benchmark, "TOKENS", 64)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_a_library_that_is_missing_is_named_in_one_line(capsys: Any, tmp_path: Path) -> None:
    assert benchmark.main(["--case", "block", "--planted", "plain", "--json", str(tmp_path / "found.json")]) == 0
    said = capsys.readouterr()
    assert "torchao is not installed: it is left out" in said.err and "sdnq is not installed" in said.err
    assert said.out.splitlines()[0] == "| Case | Planted | float16 | this extension | selected |"
    (row,) = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert 1e-4 < row["float16"] < 2e-3 < 0.01 < row[benchmark.OURS] < 0.04
    assert row["selected"].startswith("8 of 8 layers")


def test_outliers_that_are_planted_leave_the_result_in_float32_as_it_is() -> None:
    with torch.no_grad():
        (plain, run), (planted, run_planted) = (benchmark.block_case(128, 2, what) for what in ("plain", "channels"))
        assert torch.allclose(run(plain), run_planted(planted), atol=1e-3)
        assert not torch.equal(plain.norm1.weight, planted.norm1.weight)


def test_outliers_are_rotated_and_another_token_is_no_change_of_the_weights() -> None:
    with torch.no_grad():
        found = benchmark.measured("block", "channels", ())
        assert found["selected"] != benchmark.measured("block", "plain", ())["selected"]
        (plain, run), (token, other) = (benchmark.block_case(128, 2, what) for what in ("plain", "token"))
        assert all(map(torch.equal, plain.parameters(), token.parameters()))
        assert not torch.allclose(run(plain), other(token))


def test_which_layers_are_in_8_bits() -> None:
    block, _ = benchmark.block_case(128, 2, "plain")
    names = [name for name, _ in benchmark.layers(block)]
    assert len(names) == 8 and not any(name.startswith(("attn2.to_k", "attn2.to_v")) for name in names)
    assert [name for name in names if not benchmark.after_a_norm(name)] == [
        "attn1.to_out.0", "attn2.to_out.0", "ff.net.2",
    ]  # fmt: skip


def test_the_table_has_the_ways_that_were_measured() -> None:
    rows = [{"case": "a", "planted": "plain", "selected": "1 of 1", benchmark.OURS: 0.02, "SDNQ int8": 0.03}]
    lines = benchmark.table(rows).splitlines()
    assert lines[0].split(" | ")[2:4] == [benchmark.OURS, "SDNQ int8"] and lines[2].count("e-02") == 2
