"""The commands themselves, as small as they go; they run the accelerator on real models."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.fuzz import stress
from sfast_ext import cli, reasons
from sfast_ext.tools import bench, demo
from sfast_ext.tools.lib import exact, models, pipelines


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(bench.machine, "device", lambda: torch.device("cpu"))


def test_demo(tmp_path, capsys):
    arguments = [
        "demo",
        "--out",
        str(tmp_path),
        "--steps",
        "2",
        "--size",
        "64x64",
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert cli.main(arguments) == 0, capsys.readouterr().out
    result = json.loads((tmp_path / "r.json").read_text())
    rows = {row["what"]: row for row in result["rows"]}
    assert len(rows) >= 8 and not result["faults"]
    for name in ("LoRA, as AUTOMATIC1111", "LoRA, as SD.Next", "another checkpoint", "the first checkpoint again"):
        assert rows[name]["new_captures"] == 0 and rows[name]["changed"] > 10
    assert rows["first image"]["new_captures"] == 1
    assert all(0 < row["difference"] <= row["largest"] < 0.5 for row in result["rows"])
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    assert sheet.ndim == 3 and sheet.shape[0] > 4 * 200 and sheet.std() > 10
    told = capsys.readouterr().out.strip().splitlines()
    assert re.fullmatch(r"Images agree: largest difference 0\.00\d+ of 255, on average .* PASS", told[-1])
    # before the first time that looks slow
    assert "say nothing about a GPU" in "".join(told[:3])
    assert not any(word in " ".join(told) for word in ("packed_linear", "captures", "first call"))


@pytest.mark.long
def test_demo_with_a_folder_of_diffusers(tmp_path, monkeypatch, capsys, two_levels):
    pipe = pipelines.random_pipeline(dtype=torch.float32, device=torch.device("cpu"))
    pipe.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("DEMO_MODEL", str(tmp_path / "model"))
    assert cli.main(["demo", "--out", str(tmp_path), "--steps", "1", "--size", "64x64", "--verbose"]) == 0
    told = capsys.readouterr().out
    assert "packed_linear" in told and "captures" in told and "first call" in told
    # passes that found nothing are not shown
    assert not re.search(r"^\w+( +0)+$", told, re.M)
    assert re.search(r"^Images agree: .* PASS$", told.strip().splitlines()[-1])


@pytest.mark.long(but=[0, 3])
@pytest.mark.parametrize(
    ("difference", "error", "fault"),
    [(40.0, 0.03, False), (float("inf"), 0.0, True), (1.0, 0.05, True), (1.0, float("nan"), True)],
)
def test_demo_with_8_bits_tells_the_difference_and_judges_calls_by_their_budget(
    tmp_path, monkeypatch, capsys, two_levels, difference, error, fault
):
    monkeypatch.setattr(demo.LastCall, "error_of", lambda last, unet: error)
    monkeypatch.setattr(pipelines, "trained_pipeline", pipelines.random_pipeline)
    monkeypatch.setattr(demo, "_difference", lambda a, b: difference)
    # as on a GPU
    monkeypatch.setattr(demo.eight_bits, "refusal", lambda: None)
    arguments = ["demo", "--out", str(tmp_path), "--steps", "1", "--size", "64x64", "--eight-bits"]
    status = cli.main(arguments)
    out = capsys.readouterr().out
    assert (status == 1) == fault == ("FAULT" in out), out
    assert ("Images differ in details, as was asked for" in out) != fault


@pytest.mark.long
def test_demo_judges_images_as_always_if_8_bits_are_not_used(tmp_path, monkeypatch, capsys, two_levels):
    monkeypatch.setattr(pipelines, "trained_pipeline", pipelines.random_pipeline)
    monkeypatch.setattr(demo.eight_bits, "refusal", lambda: reasons.NVRTC_FOR_EIGHT_BITS(reasons.Detail("none")))
    arguments = ["demo", "--out", str(tmp_path), "--steps", "1", "--size", "64x64", "--eight-bits"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert "8 bits are not used: " in out and "Images agree: " in out
    monkeypatch.setattr(demo, "_difference", lambda a, b: 40.0)
    assert cli.main(arguments) == 1 and "FAULT first image: the images differ by 40.00" in capsys.readouterr().out


def test_demo_tells_of_an_image_that_differs(tmp_path, monkeypatch, capsys, two_levels):
    # the trained one has its own levels
    monkeypatch.setattr(pipelines, "trained_pipeline", pipelines.random_pipeline)
    wrong = iter(range(1000))
    difference = demo._difference
    monkeypatch.setattr(demo, "_difference", lambda a, b: 50.0 if next(wrong) == 1 else difference(a, b))
    assert cli.main(["demo", "--out", str(tmp_path), "--steps", "1", "--size", "64x64"]) == 1
    told = capsys.readouterr().out
    assert "FAULT another prompt: the images differ by 50.00 of 255" in told
    assert told.strip().splitlines()[-1].startswith("Images differ: ") and told.strip().endswith("FAIL")


def told(*differences: float, found: list[str], dtype: torch.dtype = torch.float32) -> str:
    rows = [SimpleNamespace(largest=10 * each, difference=each) for each in differences]
    return demo.verdict(SimpleNamespace(rows=rows, dtype=dtype, lossy=False), found)


def test_the_verdict():
    good = "Images agree: largest difference 0.0031 of 255, on average 0.00031 where 0.5 is allowed. PASS"
    assert told(0.00031, 0.0001, found=[]) == good
    assert told(0, found=[]).startswith("Images agree: largest difference 0 of 255")
    assert told(1.5, found=[], dtype=torch.float16).endswith("PASS")
    assert told(1.5, found=["a"]).startswith("Images differ: ") and told(1.5, found=["a"]).endswith("FAIL")
    assert told(float("inf"), found=["a"]).startswith("Images differ: largest difference infinite of 255")
    other = told(0.1, found=["the accelerator ran no plan"])
    assert other.startswith("Images agree: ") and other.endswith("FAIL")


class Seconds:
    """In the place of `time`: a clock that is a second further at each reading."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1.0
        return self.now


def test_bench(tmp_path, monkeypatch, capsys, two_levels):
    monkeypatch.setattr(bench, "time", Seconds())
    file = tmp_path / "deep" / "bench.json"
    arguments = [
        "bench",
        "--model",
        "tiny-sdxl",
        "--size",
        "64x64,72x64",
        "--against",
        "eager,cudagraph,eager-channels-last",
    ]
    assert cli.main([*arguments, "--iterations", "3", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert {"gpu", "driver", "torch", "triton", "cudnn", "commit"} <= set(result)
    assert [(row["width"], row["engine"]) for row in result["rows"]] == [
        (width, engine) for width in (64, 72) for engine in ("sfast", "eager", "eager-channels-last")
    ]
    for row in result["rows"]:
        assert row["model"] == "tiny-sdxl" and row["height"] == 64 and row["images"] == 1
        assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
        assert row["first_call_s"] == 1.0 and row["error_fp32"] < 1e-4
    assert result["rows"][0]["plan"]["fused"]["packed_linear"] > 0
    assert "tiny-sdxl 72×64" in capsys.readouterr().out


@pytest.mark.long
def test_bench_in_full(tmp_path, monkeypatch, capsys, two_levels):
    monkeypatch.setattr(bench, "time", Seconds())
    file = tmp_path / "full.json"
    arguments = [
        "bench",
        "--model",
        "tiny-sd15",
        "--size",
        "64x64",
        "--against",
        "eager",
        "--full",
        "--iterations",
        "2",
    ]
    assert cli.main([*arguments, "--json", str(file)]) == 0
    ours, eager = json.loads(file.read_text())["rows"]
    assert ours["flops"] == eager["flops"] > 1e7 and ours["matrix_tflops"] > 0
    limit = 1e3 * ours["flops"] / (ours["matrix_tflops"] * 1e12)
    assert ours["limit_ms"] == pytest.approx(limit, rel=1e-3)
    for row in (ours, eager):
        assert row["fraction_of_limit"] == pytest.approx(row["limit_ms"] / row["ms_p50"], rel=1e-3)
    assert ours["further_size_s"] == 1.0 and "further_size_s" not in eager
    assert "remark" not in ours and ours["weights_mb"] > 0
    assert "of the limit" in capsys.readouterr().out


def test_bench_counts_kernels_after_all_else_is_kept(monkeypatch, two_levels):
    class Counting(bench.Bench):
        def _count_kernels(self, rows, running):
            self.device = torch.device("cuda")
            super()._count_kernels(rows, running)
            self.device = torch.device("cpu")

    def events(name, kernels, copies, at):
        found = [bench.trace.Event(f"call {name}", bench.trace.RANGE, at, 100)]
        found += [bench.trace.Event("k", bench.trace.KERNEL, at + i, 1) for i in range(kernels)]
        return found + [bench.trace.Event("c", "gpu_memcpy", at + i, 1) for i in range(copies)]

    kept = []
    seen = [*events("sfast", 5, 2, 0), *events("eager", 9, 0, 10_000)]
    monkeypatch.setattr(bench.trace, "record", lambda calls, device: seen)
    options = cli.parser().parse_args(["bench"])
    measured = Counting(
        bench.Options("tiny-sd15", [(64, 64)], [1], ["sfast", "eager"], 1, options.tokens, False, False, None, True),
        torch.device("cpu"),
    )
    rows = measured.measure(bench.Case(64, 64, 1), lambda rows: kept.append([dict(row) for row in rows]))
    assert [(row["kernels"], row["copies"]) for row in rows] == [(5, 2), (9, 0)]
    assert len(kept) == 1 and all("kernels" not in row and row["ms_p50"] > 0 for row in kept[0])
    monkeypatch.setattr(bench.trace, "record", lambda calls, device: 1 / 0)
    assert all("kernels" not in row for row in measured.measure(bench.Case(64, 64, 1)))


@torch.no_grad()
@pytest.mark.parametrize("model", ["tiny-sd15", "tiny-sdxl"])
def test_the_output_in_fp32_is_of_two_rows_at_a_time(model):
    unet, batches = models.tiny_unet(model), []
    args, kwargs = models.unet_inputs(unet, 64, 64, 3, tokens=9)
    hook = unet.register_forward_pre_hook(lambda module, given: batches.append(len(given[0])))
    output = exact.Exact(unet)(args, kwargs)
    hook.remove()
    assert batches == [2, 2, 2]
    torch.testing.assert_close(output, unet(*args, **kwargs)[0])


def test_memory_of_graphs_counts_whole(monkeypatch):
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 100, "allocated_size": 40},
        {"segment_pool_id": (0, 1), "total_size": 50, "allocated_size": 10},
        {"segment_pool_id": (0, 2), "total_size": 7, "allocated_size": 7},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert bench._idle_in_graphs() == 40


def test_a_process_that_ends_without_a_result_is_told(monkeypatch, tmp_path):
    options = bench.Options("tiny-sd15", [(64, 64)], [1], ["sfast"], 1, 77, False, False, None)
    # Python finds nothing to start with
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))
    with pytest.raises(RuntimeError, match="ended with status 1 and no result"):
        bench.in_process(options, bench.Case(64, 64, 1), tmp_path)


def test_bench_says_where_an_engine_failed(monkeypatch, capsys):
    def fails(self, args, kwargs):
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(bench.engines.EagerChannelsLast, "start", fails)
    arguments = [
        "bench",
        "--model",
        "tiny-sd15",
        "--size",
        "64x64",
        "--against",
        "eager-channels-last",
        "--iterations",
        "1",
    ]
    assert cli.main(arguments) == 0
    assert "eager-channels-last: RuntimeError: no such thing" in capsys.readouterr().out


def test_bench_ends_badly_if_no_plan_ran(monkeypatch, capsys):
    monkeypatch.setattr(bench.engines.StableFast, "remark", lambda self: "the original forward ran: for a test")
    assert (
        cli.main(["bench", "--model", "tiny-sd15", "--size", "64x64", "--against", "eager", "--iterations", "1"]) == 1
    )
    assert "for a test" in capsys.readouterr().out


def test_bench_says_what_it_leaves_out(capsys, monkeypatch):
    monkeypatch.setattr(bench.Bench, "measure", lambda self, case, keep=None: [])
    assert cli.main(["bench", "--model", "tiny-sd15", "--size", "64x64", "--against", "cudagraph"]) == 0
    assert "cudagraph is left out: it needs an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.long
def test_bench_cold_measures_in_processes_of_their_own(tmp_path):
    file = tmp_path / "cold.json"
    arguments = ["bench", "--model", "tiny-sd15", "--size", "64x64", "--against", "sfast", "--iterations", "1"]
    assert cli.main([*arguments, "--cold", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["cold"] and [row["engine"] for row in result["rows"]] == ["sfast"]


@pytest.mark.long
def test_stress(tmp_path, capsys, two_levels):
    file = tmp_path / "stress.json"
    arguments = ["--tiny", "--lora", "6", "--sizes", "2", "--checkpoints", "4", "--json", str(file)]
    assert stress.main(arguments) == 0, capsys.readouterr().out
    result = json.loads(file.read_text())
    kinds = [event["kind"] for event in result["events"]]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "size": 4,
        "lora in place": 3,
        "lora replaced": 3,
        "checkpoint in place": 2,
        "checkpoint by the CPU": 2,
    }
    assert result["summary"]["captures_after_it"] == 0 and not result["faults"]
    assert result["summary"]["least_effect_of_a_lora"] > 0.05
