"""The results over models and sizes: their merging, the table and the plot of the README; a run of tiny models."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.unet import plot, table
from benchmarks.unet import run as unet
from sfast_ext import cli

STACK = {"commit": "aaaa", "driver": "580.1", "torch": "2.11.0", "triton": "3.6.0"}
TIMES = {"sfast": 5.0, "torch-compile": 6.0, "cudagraph": 12.0, "eager": 20.0}


def result(*cases, gpu="NVIDIA H200", times=None, **stack):
    rows = [
        {
            **unet.case(case)._asdict(),
            "engine": engine,
            "ms_p20": ms,
            "ms_p50": ms,
            "ms_p80": ms,
            "first_call_s": 7.04,
            "kernels": 400 if engine == "sfast" else 1000,
            "memory_mb": 150,
            "limit_ms": 2.0,
            "fraction_of_limit": 2.0 / ms,
        }
        for case in cases
        for engine, ms in (times or TIMES).items()
    ]
    return {"gpu": gpu, **STACK, **stack, "rows": rows}


def test_cases_by_their_names():
    assert unet.case("sd15:904x520:4") == ("sd15", 904, 520, 4)
    assert unet.case("tiny-sdxl:64x72").images == 1
    for each in unet.CASES:
        assert unet.case(str(each)) == each
    for wrong in ("sd99:512x512:1", "sd15:512:1", "sd15:512x513", "sd15:512x512:0", "sd15:512x512:1,4"):
        with pytest.raises(argparse.ArgumentTypeError):
            unet.case(wrong)


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "unet-h200.json"),
        ("NVIDIA GeForce RTX 4090", "unet-geforce-rtx-4090.json"),
        ("NVIDIA H100 80GB HBM3", "unet-h100-80gb-hbm3.json"),
        (None, "unet-cpu.json"),
    ],
)
def test_the_file_has_the_name_of_the_gpu(gpu, name):
    assert unet.file_for(gpu).name == name


def test_rows_are_replaced_by_model_size_images_and_engine():
    first = unet.merge(None, result("sdxl:1024x1024:1", "sd15:512x512:4"))
    both = unet.merge(first, result("sd15:512x512:1", "sd15:512x512:4", times={"sfast": 4.0, "eager": 19.0}))
    found = {(str(unet.case_of(row)), row["engine"]): row["ms_p50"] for row in both["rows"]}
    assert len(both["rows"]) == len(found) == 4 + 4 + 2
    assert found["sd15:512x512:4", "sfast"] == 4.0 and found["sd15:512x512:4", "cudagraph"] == 12.0
    assert [str(unet.case_of(row)) for row in both["rows"][::4]] == ["sd15:512x512:1", "sd15:512x512:4"] + [
        "sdxl:1024x1024:1"
    ]
    assert list(found)[:3] == [
        ("sd15:512x512:1", "sfast"),
        ("sd15:512x512:1", "eager"),
        ("sd15:512x512:4", "sfast"),
    ]


def test_each_row_says_what_it_was_measured_with():
    first = unet.merge(None, result("sd15:512x512:1"))
    assert unet.several(first) is None
    both = unet.merge(first, result("sdxl:1024x1024:1", commit="bbbb"))
    assert both["commit"] == "bbbb"
    assert {row["model"]: row["commit"] for row in both["rows"]} == {"sd15": "aaaa", "sdxl": "bbbb"}
    words = unet.several(both)
    assert "4 of commit aaaa" in words and "4 of commit bbbb" in words
    assert "aaaa" in table.stacks(both) and "bbbb" in table.stacks(both)
    # rows that already say it keep what they say
    again = unet.merge(None, both)
    assert {row["commit"] for row in again["rows"]} == {"aaaa", "bbbb"}


def test_results_of_two_gpus_do_not_mix():
    with pytest.raises(ValueError, match="cannot be in one file"):
        unet.merge(unet.merge(None, result("sd15:512x512:1")), result("sd15:512x512:4", gpu="NVIDIA H100"))


def test_what_is_measured_already():
    case, here = unet.case("sd15:512x512:1"), {"gpu": "NVIDIA H200", **STACK}
    found = unet.merge(None, result("sd15:512x512:1"))
    assert unet.measured(found, case, here)
    assert not unet.measured(None, case, here)
    assert not unet.measured(found, unet.case("sd15:512x512:4"), here)
    for changed in ({"commit": "bbbb"}, {"driver": "581"}, {"gpu": "NVIDIA H100"}, {"commit": None}):
        assert not unet.measured(found, case, {**here, **changed})
    # what differs from the commit may differ in anything
    dirty = unet.merge(None, result("sd15:512x512:1", commit="aaaa+"))
    assert not unet.measured(dirty, case, {**here, "commit": "aaaa+"})
    found["rows"].pop()
    assert not unet.measured(found, case, here)


def test_files_are_merged(tmp_path, capsys):
    one, two, into = (tmp_path / name for name in ("one.json", "two.json", "deep/all.json"))
    unet.write(one, unet.merge(None, result("sd15:512x512:1")))
    unet.write(two, unet.merge(None, result("sdxl:1024x1024:1", commit="bbbb")))
    assert unet.main(["--merge", str(one), str(two), "--json", str(into)]) == 0
    assert len(unet.read(into)["rows"]) == 8
    assert "measured with different things" in capsys.readouterr().err
    assert unet.main(["--merge", str(tmp_path / "none.json")]) == 1


def test_full_models_need_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(unet.machine, "describe", lambda: {"gpu": None, **STACK})
    assert unet.main([]) == 1 and "need a GPU" in capsys.readouterr().err


def test_rows_of_other_stacks_stand_beside_and_in_files_of_their_own():
    ways = (unet.OURS, unet.asked(stack("--attention", "doggettx", "--without", "triton", "--as", "sm_89")))
    assert unet.file_for("NVIDIA H200", ways[0]) == unet.RESULTS / "unet-h200.json"
    apart = unet.file_for("NVIDIA H200", ways[1])
    assert apart == unet.RESULTS / "unet-h200-doggettx-without-triton-as-sm_89.json"
    default, other = result("sd15:512x512:1"), result("sd15:512x512:1", times={"sfast": 9.0, "eager": 30.0})
    for row, way in zip(other["rows"], unet.side_by_side(ways[1], ["sfast", "eager"])):
        row |= way.fields()
    both = unet.merge(unet.merge(None, default), other)
    found = {unet.stack_of(row): row["ms_p50"] for row in both["rows"]}
    assert found["sfast",] == 5.0 and found["sfast", "doggettx", "without Triton", "as sm_89"] == 9.0
    assert found["eager",] == 20.0 and found["eager", "doggettx"] == 30.0
    here = {"gpu": "NVIDIA H200", **STACK}
    assert unet.measured(both, unet.case("sd15:512x512:1"), here)
    assert not unet.measured(both, unet.case("sd15:512x512:1"), here, ways[1])
    for engine in ("cudagraph", "torch-compile"):
        both["rows"].append({**both["rows"][0], **unet.Way(engine, "doggettx").fields()})
    assert unet.measured(both, unet.case("sd15:512x512:1"), here, ways[1])


def stack(*words):
    parser = argparse.ArgumentParser()
    cli.add_stack(parser)
    return parser.parse_args(words)


def test_a_case_is_measured_with_the_stack_that_was_asked_for(monkeypatch, tmp_path):
    asked = []

    def in_process(options, case, caches):
        asked.append(options)
        return {"rows": [{"engine": "sfast", "first_call_s": 1.5}]}

    monkeypatch.setattr(unet.bench, "in_process", in_process)
    ours = unet.asked(stack("--attention", "v1", "--upcast"))
    assert unet.measure(unet.case("tiny-sd15:64x64"), 3, ours)["rows"][0]["first_call_warm_s"] == 1.5
    assert [options.ours for options in asked] == [ours, ours]


def test_a_run_of_a_tiny_model_and_its_resumption(tmp_path, monkeypatch, capsys, two_levels):
    def here(command, env, stdout):
        """The command of a process of its own, without another start of Python and torch."""
        assert command[:2] == [sys.executable, str(unet.bench.machine.PACKAGE)] and set(unet.bench.CACHES) <= env.keys()
        return subprocess.CompletedProcess(command, cli.main(command[2:]))

    file = tmp_path / "unet.json"
    monkeypatch.setattr(unet.bench, "subprocess", SimpleNamespace(run=here, DEVNULL=subprocess.DEVNULL))
    monkeypatch.setattr(unet.bench.machine, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(unet, "ENGINES", ["sfast", "eager"])
    monkeypatch.setenv("SFAST_COMMIT", "0123456789ab")
    arguments = ["--case", "tiny-sd15:64x64:1", "--json", str(file), "--iterations", "2"]
    assert unet.main(arguments) == 0
    found = json.loads(file.read_text())
    assert {"gpu", "driver", "torch", "triton", "commit", "rows"} == set(found)
    ours, eager = found["rows"]
    assert (ours["engine"], eager["engine"]) == ("sfast", "eager")
    assert {row["commit"] for row in found["rows"]} == {found["commit"]} == {"0123456789ab"}
    for name in ("ms_p20", "ms_p50", "ms_p80", "flops"):
        assert ours[name] > 0
    # single calls, which a clock of coarse steps may not see
    for name in ("first_call_s", "first_call_warm_s", "further_size_s"):
        assert isinstance(ours[name], float) and ours[name] >= 0
    assert ours["fraction_of_limit"] > 0 and ours["error_fp32"] < 1e-4
    assert "tiny-sd15 64×64" in capsys.readouterr().out
    monkeypatch.setattr(unet, "measure", lambda case, iterations, ours: pytest.fail("measured again"))
    assert unet.main(arguments) == 0
    assert "tiny-sd15:64x64:1: measured already" in capsys.readouterr().out


def test_a_case_without_a_result_keeps_no_other_from_being_measured(tmp_path, monkeypatch, capsys):
    def measure(case, iterations, ours):
        if case.images == 4:
            raise RuntimeError("ended with status -9 and no result")
        return result(str(case), gpu=None)

    file = tmp_path / "unet.json"
    monkeypatch.setattr(unet, "measure", measure)
    monkeypatch.setattr(unet.bench, "tables", lambda rows: "")
    arguments = ["--case", "tiny-sd15:64x64:4", "--case", "tiny-sd15:64x64:1", "--json", str(file)]
    assert unet.main(arguments) == 1
    assert len(unet.read(file)["rows"]) == 4
    assert "tiny-sd15:64x64:4: ended with status -9" in capsys.readouterr().err


def test_the_table_of_the_readme():
    found = unet.merge(None, result("sd15:512x512:1", "sdxl:1024x1024:4"))
    for row in found["rows"]:
        if row["model"] == "sd15" and row["engine"] == "sfast":
            row |= {"first_call_warm_s": 3.0, "further_size_s": 1.0}
        if row["model"] == "sd15" and row["engine"] == "torch-compile":
            row |= {"failed": "no compiler", "ms_p50": None}
    lines = table.render(found).splitlines()
    assert len(lines) == 4 and {line.count("|") for line in lines} == {len(table.HEAD) + 1}
    assert lines[2].startswith("| sd15, 512×512 | 20.00 | 12.00 | – | **5.00** | 4.00 × | – | 40 % | 1000 → 400 |")
    assert lines[2].endswith("| 150 → 150 | 7.0 / 3.0 / 1.0 |")
    assert "| sdxl, 1024×1024, 4 images |" in lines[3] and "1.20 ×" in lines[3] and "7.0 / – / –" in lines[3]


def test_table_and_plot_are_written_between_the_marks(tmp_path, monkeypatch, capsys):
    for folder in ("benchmarks", "docs"):
        (tmp_path / folder).mkdir()
    page = tmp_path / "docs" / "measurements.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    monkeypatch.setattr(table, "ROOT", tmp_path)
    assert table.main([]) == 1 and "make bench" in capsys.readouterr().err
    unet.write(tmp_path / "benchmarks" / "results" / "unet-h200.json", unet.merge(None, result("sd15:512x512:1")))
    assert table.main(["--print"]) == 0
    assert "old" in page.read_text() and "| sd15, 512×512 |" in capsys.readouterr().out
    assert table.main([]) == 0
    text = page.read_text()
    assert text.startswith(f"before\n{table.BEGIN}\n| one UNet call |") and text.endswith(f"{table.END}\nafter\n")
    assert "old" not in text and "NVIDIA H200, measured with torch 2.11.0" in text
    image = text.split("](", 1)[1].split(")", 1)[0]
    assert (page.parent / image).is_file()
    assert table.main([]) == 0 and page.read_text() == text


def test_the_plot_has_a_bar_for_each_time():
    found = unet.merge(None, result("sd15:512x512:1", "sdxl:1024x1024:4"))
    found["rows"][1]["ms_p50"] = None
    space = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(plot.bars(found))
    bars = [r for r in root.iter(f"{space}rect") if float(r.get("x", 0)) == plot.LEFT]
    assert len(bars) == 7
    widths = [float(bar.get("width")) for bar in bars]
    assert max(widths) == plot.WIDTH - plot.LEFT - plot.RIGHT
    assert widths[0] == pytest.approx(max(widths) * 5 / 20, abs=0.1)
    words = [text.text for text in root.iter(f"{space}text")]
    assert "sdxl, 1024×1024, 4 images" in words and "20.00 ms" in words and "–" in words
    # none of it lies outside of the image
    assert max(float(r.get("y", 0)) for r in bars) + plot.BAR < float(root.get("height"))
