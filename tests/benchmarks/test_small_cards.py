"""Small cards: what is told of an emulated card, a case's life on tiny models on the CPU, verdicts and the table."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.small_cards import card, hosts, life, parts, run, table
from benchmarks.small_cards.run import Case
from sfast_ext import environment

GIB = 1 << 30


def test_a_card_tells_of_its_own_memory_and_the_allocator_stops_there(monkeypatch):
    held, fraction = [0], []
    own = SimpleNamespace(name="a large GPU", total_memory=80 * GIB, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: held[0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: own)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fraction.append)
    for home in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(home, "mem_get_info", lambda device=None: (70 * GIB, 80 * GIB))
    with card.small_card(8) as total:
        assert total == 8 * GIB - card.CONTEXT and fraction == [total / (80 * GIB)]
        for home in (torch.cuda, torch.cuda.memory):
            assert home.mem_get_info() == (total, total)
        held[0] = 3 * GIB
        assert torch.cuda.mem_get_info() == (total - 3 * GIB, total)
        held[0] = 9 * GIB
        assert torch.cuda.mem_get_info() == (0, total)
        found = torch.cuda.get_device_properties(0)
        assert (found.total_memory, found.name, found.major) == (total, "a large GPU", 9)
        # the budget of graphs is that of the small card
        assert environment.graph_budget_mb() == total >> 22 < 2048
    assert torch.cuda.mem_get_info() == torch.cuda.memory.mem_get_info() == (70 * GIB, 80 * GIB)
    assert torch.cuda.get_device_properties() is own and fraction[-1] == 1.0
    with pytest.raises(ValueError, match="cannot pass for one of 96"), card.small_card(96):
        pass


@pytest.fixture
def apart(monkeypatch):
    """What a process of its own would have had: no stand-ins are left over."""
    before, path = dict(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in [
        n for n in sys.modules if n not in before and n.partition(".")[0] in ("modules", "gradio", "networks")
    ]:
        del sys.modules[name]


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("mode", ["medvram-sdxl", "balanced"])
def test_the_life_of_a_case(mode, apart, tmp_path, monkeypatch):
    if mode == "balanced":
        pytest.importorskip("accelerate")
    # a second size would take seconds more for its plan, and tell nothing new
    monkeypatch.setattr(run, "sizes", lambda model: [(64, 64)] * 3)
    case, found = Case(8, "tiny-sd15", mode), {}
    for way in run.WAYS:
        file = tmp_path / f"{way}.json"
        run.one(case, way == "ours", 2, file)
        row = found[way] = {**case._asdict(), "way": way, **json.loads(file.read_text())}
        assert not table.ended(row) and not table.ran_out(row) and row["faults"] == [], row
        assert [p["size"] for p in row["images"]] == ["64x64"] * 3
        assert all(p["seconds"] >= p["prompt_s"] + p["vae_s"] > 0 and p["step_ms"] >= 0 for p in row["images"])
    assert "reasons" not in found["stock"] and found["stock"]["images"][0]["counted"] == {}
    images = found["ours"]["images"]
    runs = [p["counted"]["eager_runs"] for p in images]
    assert runs == [1, 2, 2] and [p["counted"]["captures"] for p in images] == [1, 0, 0]
    assert found["ours"]["last_error"] is None and found["ours"]["reasons"] == []
    found["ours"]["errors"] = run.errors(*(tmp_path / f"{way}.json" for way in run.WAYS))
    assert len(found["ours"]["errors"]) == 3 and max(found["ours"]["errors"]) < 1e-3
    verdicts = table.verdicts(found["stock"], found["ours"])
    # how long they take is nobody's promise here
    assert all(met for met, what in verdicts if " s, the WebUI alone" not in what) and len(verdicts) == 3
    assert " → " in table.words(found["stock"], found["ours"])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["medvram-sdxl", "balanced"])
def test_on_a_gpu_images_are_the_same_while_weights_leave_and_come_back(mode, tmp_path):
    case, files = Case(4, "tiny-sd15", mode), [tmp_path / f"{way}.json" for way in run.WAYS]
    stock, ours = (run.in_process(case, way, 3, file, 100) for way, file in zip(run.WAYS, files))
    for row in (stock, ours):
        assert not table.ended(row) and not table.ran_out(row) and row["faults"] == [], row
    assert sum(p["counted"]["weights_away"] for p in ours["images"]) >= 4
    apart = run.errors(*files)
    assert len(apart) == 5 and all(error is not None and error < 0.02 for error in apart), apart


def test_memory_that_runs_out_is_told_with_its_place_and_the_life_goes_on():
    class Host(hosts.Host):
        def encode(self, ids):
            return [SimpleNamespace(last_hidden_state=torch.zeros(2, 3, 4))]

        def unet(self, latent, t, given):
            if len(calls) == 1:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            calls.append(1)
            return latent

        def decode(self, latent):
            if latent.shape[-1] == 12:
                raise RuntimeError("broken")
            return latent

        def end(self):
            ends.append(1)

    unet = SimpleNamespace(dtype=torch.float32, config=SimpleNamespace(in_channels=4))
    made = parts.Parts("tiny-sd15", unet, None, [])
    calls: list[int] = []
    ends: list[int] = []
    kept: list[int] = []
    host = Host(made, torch.device("cpu"))
    first, latents = life.live(host, [(64, 64)], 3, lambda rows, latents: kept.append(len(rows)))
    assert first[0]["out_of_memory"] == "step 2" and latents == [None] and ends == [1] and kept == [1]
    calls.append(1)
    rows, latents = life.live(host, [(64, 64), (96, 64)], 3, lambda rows, latents: kept.append(len(rows)))
    assert "out_of_memory" not in rows[0] and rows[0]["seconds"] > 0 and latents[0].shape == (1, 4, 8, 8)
    assert rows[1]["failed"] == "the VAE" and "broken" in rows[1]["message"] and kept == [1, 1, 2]


def image(size: str, seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    numbers = {"step_ms": 100 * seconds, "reserved_mb": 5000.0, "allocated_mb": 4000.0, "graphs": 1, "graphs_mb": 300.0}
    return {"size": size, "seconds": seconds, **numbers, **more}


def rows(stock: list[float | str], ours: list[float | str], **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two lives: seconds of each image, or where memory ran out."""
    sizes = ["64x64", "64x64", "64x96", "64x96", "64x64"]

    def made(told: list[float | str]) -> list[dict[str, Any]]:
        return [
            {"size": size, "out_of_memory": each} if isinstance(each, str) else image(size, each)
            for size, each in zip(sizes, told)
        ]

    head = {"card": 8.0, "model": "sdxl", "mode": "medvram-sdxl"}
    return {**head, "way": "stock", "images": made(stock)}, {**head, "way": "ours", "images": made(ours), **more}


def test_what_is_asked_of_a_case():
    def met(*args: Any, **more: Any) -> list[bool]:
        return [each for each, _ in table.verdicts(*rows(*args, **more))]

    assert met([2.0] * 5, [9.0, 1.5, 9.0, 1.5, 1.5], errors=[0.01] * 5) == [True, True, True]
    assert met([2.0] * 5, [2.0, 2.2, 2.0, 2.2, 2.2]) == [True, False]
    assert met([2.0] * 5, [2.0, "the VAE", 2.0, 2.0, 2.0]) == [False]
    # if the WebUI alone is out of memory as well, nothing is lost
    assert met([2.0, 2.0, "the VAE", "the VAE", 2.0], [2.0, 1.0, "the VAE", "the VAE", 1.0]) == [True]
    assert met([2.0] * 5, [2.0] * 5, errors=[0.5, None]) == [True, True, False]
    assert met([2.0] * 5, [2.0] * 5, last_error="first run: no") == [True, True, False]
    assert met([2.0] * 5, [], out_of_memory="loading") == [False]
    assert met([2.0] * 5, [1.0], failed="took longer than 90 s") == [False]
    assert met([2.0] * 5, [], missing="the time was over") == []


def test_the_page_keeps_the_words_around_the_table(tmp_path):
    stock, ours = rows([2.0, 2.0, "the VAE", "the VAE", 2.0], [9.0, 1.5, "the VAE", 1.5, 1.5], reasons=["a | b"])
    found = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": None, "commit": "abc", "rows": [stock, ours]}
    page = tmp_path / "small-cards.md"
    page.write_text("# Small cards\n\nWords.\n", encoding="utf-8")
    table.write([found], page)
    once = page.read_text(encoding="utf-8")
    assert once.startswith("# Small cards\n\nWords.\n") and "AUTOMATIC1111, `--medvram-sdxl`" in once
    lines = [line for line in once.splitlines() if line.startswith("| ") and "---" not in line]
    assert {line.replace("\\|", "").count("|") for line in lines} == {len(table.HEAD) + 1} and len(lines) == 2
    assert "the VAE (64x96)" in lines[1] and "2.0 → 9.0" in lines[1] and "a \\| b" in lines[1]
    page.write_text(once + "\nMore words.\n", encoding="utf-8")
    table.write([found], page)
    assert page.read_text(encoding="utf-8") == once + "\nMore words.\n"


def test_the_page_is_there():
    assert table.PAGE.is_file()


def test_each_case_is_run_in_two_processes_and_the_file_is_kept_after_each(tmp_path, monkeypatch, capsys):
    began, limits, file, gpu = [], [], tmp_path / "deep" / "small.json", ["NVIDIA H200"]
    monkeypatch.setattr(run.machine, "describe", lambda: {"gpu": gpu[0], "torch": "2.11.0", "commit": "abc"})

    def in_process(case, way, steps, into, timeout):
        began.append((str(case), way, len(json.loads(file.read_text())["rows"]) if file.exists() else 0))
        limits.append(timeout)
        torch.save([torch.ones(2), None], into.with_suffix(".latents"))
        made = [image("64x64", 2.0), image("64x64", 1.0 if way == "ours" else 2.0)]
        return {**case._asdict(), "way": way, "steps": steps, "images": made}

    monkeypatch.setattr(run, "in_process", in_process)
    assert run.main(["--json", str(file), "--card", "6", "--model", "sdxl"]) == 0
    modes = [case.mode for case in run.CASES if (case.card, case.model) == (6, "sdxl")]
    assert began == [
        (f"sdxl on 6 GB, {mode}", way, 2 * n + (way == "ours")) for n, mode in enumerate(modes) for way in run.WAYS
    ]
    # an equal share of what is left, if that is more than a process gets among all cases
    share = 60 * run.MINUTES / len(began)
    assert share > run.PROCESS_S and limits[0] == pytest.approx(share, rel=0.05) and limits == sorted(limits)
    assert json.loads(file.read_text())["rows"][1]["errors"] == [0.0, None]
    assert "met: sdxl on 6 GB" in capsys.readouterr().out
    measured = json.loads(file.read_text())["rows"]
    assert {row["commit"] for row in measured} == {"abc"}
    # nothing begins after the time is over, and that is told; what was measured before stays
    assert run.main(["--json", str(file), "--minutes", "0"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert rows[: len(measured)] == measured and len(rows) == 2 * len(run.CASES)
    assert {row["missing"] for row in rows[len(measured) :]} == {"the time was over"}
    # a case that is measured again has its new rows alone
    assert run.main(["--json", str(file), "--card", "6", "--model", "sdxl", "--mode", modes[0], "--steps", "3"]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 * len(run.CASES) and [row["steps"] for row in rows[-2:]] == [3, 3]
    gpu[0] = "NVIDIA H100"
    assert run.main(["--json", str(file), "--minutes", "0"]) == 0
    assert {row.get("missing") for row in json.loads(file.read_text())["rows"]} == {"the time was over"}


def test_a_process_that_fails_leaves_a_reason(tmp_path, monkeypatch):
    case = Case(8, "tiny-sd15", "none")

    def ended(*_, **__):
        return SimpleNamespace(returncode=-9, stderr="killed")

    monkeypatch.setattr(run.subprocess, "run", ended)
    row = run.in_process(case, "ours", 2, tmp_path / "none.json", 60)
    assert "-9" in row["failed"] and row["message"] == "killed" and row["images"] == []

    def slow(*_, **__):
        raise subprocess.TimeoutExpired("python", 60)

    monkeypatch.setattr(run.subprocess, "run", slow)
    # what was measured until then is kept
    (tmp_path / "some.json").write_text(json.dumps({"images": [image("64x64")]}))
    row = run.in_process(case, "ours", 2, tmp_path / "some.json", 60)
    assert "longer than 60 s" in row["failed"] and len(row["images"]) == 1


def test_a_model_that_cannot_be_made_is_told(tmp_path, monkeypatch):
    def build(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(run, "build", build)
    run.one(Case(4, "tiny-sd15", "none"), True, 2, tmp_path / "one.json")
    row = json.loads((tmp_path / "one.json").read_text())
    assert row["out_of_memory"] == "loading" and row["images"] == []


def test_a_package_that_is_not_there_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "build", lambda *_: __import__("no_such_package"))
    run.one(Case(4, "tiny-sd15", "none"), True, 2, tmp_path / "one.json")
    row = json.loads((tmp_path / "one.json").read_text())
    assert "no_such_package" in row["missing"] and not table.verdicts(row, row)


def test_full_models_need_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(run.machine, "describe", lambda: {"gpu": None})
    assert run.main([]) == 1 and "need a GPU" in capsys.readouterr().err


def test_the_order_of_sizes():
    assert run.sizes("sdxl") == [(1024, 1024)] * 2 + [(832, 1216)] * 2 + [(1024, 1024)]
    assert [case.card for case in run.CASES[:3]] == [8, 8, 4] and len(set(run.CASES)) == len(run.CASES)


def test_a_model_with_two_text_encoders(tmp_path):
    made = parts.build("tiny-sdxl", torch.device("cpu"), torch.float32)
    outputs = parts.Conditioner(made.encoders)(made.ids(torch.device("cpu")))
    given = parts.conditioning(made, outputs, 64, 64)
    with torch.no_grad():
        latent = torch.cat([made.latent(64, 64)] * 2)
        assert made.unet(latent, 5, **given, return_dict=False)[0].shape == latent.shape
        assert made.vae.decode(latent, return_dict=False)[0].shape == (2, 3, 64, 64)


def test_texts_of_real_widths():
    """What the UNets take is what the text encoders give."""
    for name in ("sd15", "sdxl"):
        config = run.build.__globals__["models"].unet_config(name)
        widths = [width for width, _, _ in parts._ENCODERS[name]]
        assert sum(widths) == config["cross_attention_dim"]
        if name == "sdxl":
            assert config["projection_class_embeddings_input_dim"] == widths[1] + 6 * config["addition_time_embed_dim"]
