"""The ways that a benchmark compares: attentions, without Triton, as another GPU."""

from __future__ import annotations

import argparse
import json
import threading

import pytest
import torch

from sfast_ext import Config, cli
from sfast_ext.kernels.backend import triton_runtime
from sfast_ext.tools import bench
from sfast_ext.tools.lib import Unavailable, attentions, engines, models, ways
from sfast_ext.tools.lib.ways import OURS, Way

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(bench.machine, "device", lambda: CPU)


def test_the_command_line_offers_what_there_is():
    assert set(cli.ATTENTIONS) == set(attentions.NAMES)
    assert set(cli.ENGINES) == set(engines.ENGINES)


def test_a_way_goes_through_the_command_line_and_json():
    most = Way("sfast", "doggettx", True, False, (8, 9), "bfloat16")
    both = Way("sfast", "v1", faster_sums=True, eight_bits=True)
    lossy = (Way("sfast", faster_sums=True), Way("sfast", eight_bits=True), both)
    for way in (OURS, most, Way("sfast", capability=(10, 0)), Way("sfast", dtype="float32"), *lossy):
        parsed = cli.parser().parse_args(["bench", *way.arguments()])
        assert ways.asked(parsed) == way
        assert ways.words_of(json.loads(json.dumps(way.fields()))) == way.words()
    assert str(Way("sfast", "v1", True, False, (8, 9))) == "sfast, v1, upcast, without Triton, as sm_89"
    assert str(Way("sfast", dtype="bfloat16")) == "sfast, bfloat16"
    assert str(both) == "sfast, v1, faster sums, 8 bits" and "eight_bits" not in OURS.stack()
    assert str(OURS) == "sfast" and str(Way("eager", "plain")) == "eager, plain"
    # rows that were written before there was a choice
    assert ways.words_of({"engine": "sfast"}) == []


@pytest.mark.parametrize("text", ["89", "sm_89", "SM_89"])
def test_capabilities_by_their_names(text):
    assert cli.capability(text) == (8, 9) and cli.capability("sm_120") == (12, 0)


@pytest.mark.parametrize("text", ["ada", "sm_", "sm_9", "8.9", ""])
def test_what_is_no_capability_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no compute capability, e.g. sm_89"):
        cli.capability(text)


def test_the_others_have_the_attention_of_ours_and_nothing_else():
    ours = Way("sfast", "doggettx", True, False, (8, 9), "bfloat16")
    assert ways.side_by_side(ours, ["sfast", "eager"]) == [ours, Way("eager", "doggettx", True, dtype="bfloat16")]


def test_a_gpu_passes_for_another_in_all_threads_and_is_itself_again(monkeypatch):
    before = triton_runtime.capability
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    seen = {}
    with ways.passing_for((8, 9)):
        thread = threading.Thread(target=lambda: seen.update(hopper=triton_runtime.hopper(GPU)))
        thread.start()
        thread.join()
        assert triton_runtime.capability(GPU) == (8, 9) and not triton_runtime.hopper(GPU)
        assert triton_runtime.capability(CPU) == (0, 0) and not triton_runtime.pdl_enabled(GPU)
        # float16 on Hopper alone; the interpreter multiplies anywhere
        x = torch.empty(2, dtype=torch.float16, device="meta")
        with triton_runtime.dry_run(GPU):
            assert (triton_runtime.accepts_products(x) is None) == triton_runtime.INTERPRETED
    assert seen == {"hopper": False}
    assert triton_runtime.capability is before
    with ways.passing_for(None):
        assert triton_runtime.capability is before
    with pytest.raises(ZeroDivisionError), ways.passing_for((7, 5)):
        1 / 0
    assert triton_runtime.capability is before


def test_what_a_gpu_cannot_pass_for_is_said(monkeypatch):
    with pytest.raises(Unavailable, match="no NVIDIA GPU that could pass for sm_89"):
        ways.check_card((8, 9), CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    ways.check_card((8, 9), GPU)
    ways.check_card((7, 0), GPU)
    with pytest.raises(Unavailable, match="this GPU is sm_89: it has not what is used on sm_90"):
        ways.check_card((9, 0), GPU)
    with pytest.raises(Unavailable, match="nothing older than sm_70 is accelerated, and sm_61 is"):
        ways.check_card((6, 1), GPU)


@pytest.mark.parametrize("field", ["faster_sums", "eight_bits"])
def test_ours_with_what_changes_details_is_configured_so(tiny_unet, field):
    engine = Way("sfast", **{field: True}).start(tiny_unet())
    assert engine.accelerator.config == Config(allow_cpu=True, graph_memory_mb=0, drop_slower=False, **{field: True})
    engine.stop()


@pytest.mark.parametrize(("asked", "said"), [(True, "8 bits are not used: no room"), (False, None)])
def test_8_bits_that_were_asked_for_and_not_used_are_told(tiny_unet, monkeypatch, asked, said):
    engine = Way("sfast", eight_bits=asked).start(tiny_unet())
    told = {"plans": [{}], "eight_bits": {"layers": 0, "reason": {"text": "8 bits are not used: no room"}}}
    monkeypatch.setattr(engine.accelerator, "status", lambda: told)
    assert engine.remark() == said
    engine.stop()


@pytest.mark.parametrize("triton", [True, False])
def test_ours_without_triton_is_configured_so(tiny_unet, triton):
    engine = Way("sfast", triton=triton).start(tiny_unet())
    assert engine.accelerator.config == Config(allow_cpu=True, graph_memory_mb=0, drop_slower=False, triton=triton)
    engine.stop()


@pytest.mark.long
def test_bench_gives_all_engines_the_attention_and_writes_what_was_asked_for(tmp_path, capsys):
    file = tmp_path / "bench.json"
    arguments = ["bench", "--model", "tiny-sd15", "--size", "64x64", "--against", "eager,eager-channels-last"]
    arguments += ["--attention", "doggettx", "--upcast", "--without", "triton", "--iterations", "2"]
    assert cli.main([*arguments, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert (result["attention"], result["upcast"], result["without"], result["as"]) == (
        "doggettx",
        True,
        ["triton"],
        None,
    )
    for row in result["rows"]:
        assert row["attention"] == "doggettx" and row["upcast"] is True and row["as"] is None
        assert row["without"] == (["triton"] if row["engine"] == "sfast" else [])
        assert row["error_fp32"] < 1e-4 and "remark" not in row
    assert "tiny-sd15 64×64, 1 at once, doggettx, upcast, without Triton" in capsys.readouterr().out


@pytest.mark.long(but=[0, 2, 4])
@pytest.mark.parametrize("name", [name for name in attentions.NAMES if name != "xformers"])
def test_each_engine_runs_with_each_attention(name, two_levels):
    options = bench.Options(
        "tiny-sd15", [(64, 64)], [1], ["sfast", "eager"], 1, 77, False, False, None, ours=Way("sfast", name)
    )
    measured = bench.Bench(options, CPU)
    for engine in measured.engines.values():
        kinds = {type(attn.processor).__name__ for _, attn in attentions.attention_layers(engine.unet)}
        assert kinds == {PROCESSORS.get(name, "Processor")}
    rows = measured.measure(bench.Case(64, 64, 1))
    assert [row["error_fp32"] < 1e-4 for row in rows] == [True, True]
    assert all("failed" not in row and "remark" not in row for row in rows)


def test_each_engine_has_the_model_in_the_dtype_asked_for(two_levels):
    options = bench.Options(
        "tiny-sd15", [(64, 64)], [1], ["sfast", "eager"], 1, 77, False, False, None, ours=Way("sfast", dtype="bfloat16")
    )
    measured = bench.Bench(options, CPU)
    assert [next(e.unet.parameters()).dtype for e in measured.engines.values()] == [torch.bfloat16] * 2
    for row in measured.measure(bench.Case(64, 64, 1)):
        assert row["dtype"] == "bfloat16" and 1e-3 < row["error_fp32"] < 5e-2
        assert "failed" not in row and "remark" not in row


PROCESSORS = {"sdp": "AttnProcessor2_0", "plain": "AttnProcessor", "sliced": "SlicedAttnProcessor"}


def test_what_is_missing_ends_the_command_with_a_sentence(monkeypatch, capsys):
    def missing():
        raise Unavailable("xformers cannot be imported (ImportError: none): install it")

    monkeypatch.setattr(attentions, "xformers_ops", missing)
    arguments = ["bench", "--model", "tiny-sd15", "--size", "64x64", "--iterations", "1"]
    assert cli.main([*arguments, "--attention", "xformers"]) == 2
    assert "xformers cannot be imported" in capsys.readouterr().err
    assert cli.main([*arguments, "--as", "sm_89"]) == 2
    assert "no NVIDIA GPU that could pass for sm_89" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.skipif(torch.__version__ < "2.3", reason="that torch.compile breaks the graph where memory is asked for")
@pytest.mark.parametrize("name", ["doggettx", "subquad"])
def test_torch_compile_takes_the_free_memory_for_a_constant(name, monkeypatch, two_levels, unet_inputs):
    """As one graph: what asks for memory would break it in two."""
    asked = []
    unet = models.random_unet("tiny-sd15")
    args, kwargs = unet_inputs(unet)
    with torch.no_grad():
        wanted = unet(*args, **kwargs)[0]
        attentions.install(unet, name)
        monkeypatch.setattr(attentions, "free_memory", lambda device: asked.append(str(device)) or 1 << 40)
        honest = torch.compile
        monkeypatch.setattr(torch, "compile", lambda *a, **k: honest(*a, **k, backend="eager"))
        engine = engines.TorchCompile(unet)
        engine.start(args, kwargs)
        torch.testing.assert_close(engine.call(), wanted, rtol=1e-3, atol=1e-4)
        asked.clear()
        engine.call()
        engine.stop()
    assert not asked
