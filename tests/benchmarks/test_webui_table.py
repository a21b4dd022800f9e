"""The table of whole images in all WebUIs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.webui import table
from benchmarks.webui.hosts import HOSTS, LARGE
from benchmarks.webui.images import KINDS


def run(host: str, model: str = "sd15", **row: Any) -> dict[str, Any]:
    """A run of one row."""
    said: dict[str, Any] = {"kind": "txt2img", "width": 512, "height": 768, "flags": "", "plans_ran": 3}
    said |= {"median_s": {"stock": 1.5, "extended": 0.5}, "apart_of_255": [0.1, 0.26], "last_error": None}
    stack = {"gpu": "NVIDIA H200", "torch": "2.11.0", "driver": "580.1", "commit": "0123456789ab+"}
    return {**stack, "host": host, "model": model, "rows": [said | row]}


def test_a_row_for_each_size_and_kind():
    more = {"median_s": {"stock": 1.5, "unet": 0.61, "extended": 0.5}, "kind": "control", "flags": "--x", "width": 64}
    text = table.render([run("forge"), run("forge", "sdxl", **more)])
    assert text.splitlines()[2:] == [
        "| Forge 2.0.1, SD 1.5, 512×768 | 1.50 | **0.50** | 3.0 × | 0.26 |",
        "| Forge 2.0.1, SDXL, 64×768, with a ControlNet, `--x` | 1.50 | **0.50**, the UNet alone 0.61 | 3.0 × | 0.26 |",
    ]  # fmt: skip


@pytest.mark.parametrize("failed", [{"plans_ran": 0}, {"last_error": "out of memory"}])
def test_no_row_of_what_failed(failed: dict[str, Any]):
    assert len(table.render([run("forge", **failed)]).splitlines()) == 2


def test_every_commit_is_named():
    results = [run("forge"), {**run("reforge"), "commit": "ba9876543210"}, run("a1111")]
    assert table.stacks(results) == "; ".join(
        f"NVIDIA H200, torch 2.11.0, driver 580.1, {commit}" for commit in ("01234567", "ba987654")
    )


def test_every_webui_model_and_kind_has_a_name():
    assert table.HOSTS.keys() == HOSTS.keys() and table.MODELS.keys() == LARGE.keys()
    assert set(KINDS) - {"faces"} == table.KINDS.keys()


def test_a_run_takes_the_place_of_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = tmp_path / "docs" / "measurements.md"
    page.parent.mkdir()
    page.write_text(f"before\n{table.BEGIN}\n{table.END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(table, "RESULTS", tmp_path / "results.json")
    for number, each in enumerate([run("reforge"), run("a1111", flags="--x"), run("a1111"), run("reforge", width=640)]):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(each), encoding="utf-8")
        table.main(["--add", str(file)])
    told = [line for line in page.read_text(encoding="utf-8").splitlines() if "×" in line]
    assert [line.split(" | ")[0] for line in told] == [
        "| AUTOMATIC1111 1.10.1, SD 1.5, 512×768",
        "| AUTOMATIC1111 1.10.1, SD 1.5, 512×768, `--x`",
        "| reForge 1.0.0, SD 1.5, 640×768",
    ]
    assert len(json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))) == 3
