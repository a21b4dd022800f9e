"""The table of what each Triton compiles: what it calls a failure, and what it is made of."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.compile_table import compiler as triton_compiler
from benchmarks.compile_table import launches
from benchmarks.compile_table import run as compile_table
from sfast_ext.kernels.backend import triton_runtime
from sfast_ext.kernels.backend.size_prediction import Launch

LAUNCH = {
    "home": "sfast_ext.kernels.pointwise.layer_norm",
    "name": "layer_norm_kernel",
    "types": {},
    "constants": {},
    "divisible": [],
}
EVERY = {"float16": {str(capability): [LAUNCH] for capability in triton_compiler.SHARED}}


def row(compiled, failed=None):
    return {"launches": 2, "compiled": compiled, "shared": 0, "failed": failed or {}}


@pytest.fixture
def compiler(monkeypatch):
    """Triton 2.1 with what it makes of a launch."""
    made = SimpleNamespace(result=triton_compiler.Compiled("ptx", 0))

    def compiled(*args):
        if isinstance(made.result, Exception):
            raise made.result
        return made.result

    monkeypatch.setattr(triton_compiler, "version", lambda: (2, 1))
    monkeypatch.setattr(triton_compiler, "compiled", compiled)
    return made


def test_what_compiles_counts(compiler):
    found = compile_table.compile_all(EVERY)["float16"]
    assert list(found) == ["75", "80", "86", "89", "90"]
    assert all(each["compiled"] == each["launches"] == 1 and not each["failed"] for each in found.values())


def test_what_does_not_fit_a_card_is_a_failure_there(compiler):
    compiler.result = triton_compiler.Compiled("ptx", 69632)
    found = compile_table.compile_all(EVERY)["float16"]
    assert [each["compiled"] for each in found.values()] == [0, 1, 1, 1, 1]
    assert "69632 bytes of shared memory" in found["75"]["failed"]["layer_norm.layer_norm_kernel"]


def test_what_a_version_is_not_used_for_is_no_failure(compiler):
    found = compile_table.compile_all({"bfloat16": EVERY["float16"]})
    assert found["bfloat16"]["80"]["compiled"] == 1
    assert "bfloat16" in found["bfloat16"]["75"]["refused"]
    results = {"2.1.0": {"dtypes": found, "cases": {"bfloat16": ["sd15:512x512"]}}}
    assert compile_table.nothing_compiled({"2.1.0": found}) == []
    page = compile_table.render(results)
    assert "| 2.1.0 | 2.1 | not used | 1 of 1 |" in page and "- Not used: Triton 2.1 has no bfloat16 for" in page
    # versions in sequence that compile the same have one row
    page = compile_table.render(results | {"2.2.0": results["2.1.0"]})
    assert "| bfloat16 | 2.1.0, 2.2.0 | 2.1, 2.2 | not used | 1 of 1 |" in page
    assert "Launches in bfloat16 are of sd15:512x512." in page


def test_a_version_that_compiles_nothing_fails_the_command(compiler, monkeypatch, tmp_path, capsys):
    compiler.result = ValueError("not this one\n  refused  ")
    dtypes = compile_table.compile_all(EVERY)
    assert dtypes["float16"]["90"]["failed"] == {"layer_norm.layer_norm_kernel": "ValueError: refused"}
    page = tmp_path / "page.md"
    page.write_text(f"head\n{compile_table.BEGIN}\nold\n{compile_table.END}\nfoot\n", encoding="utf-8")
    monkeypatch.setattr(compile_table, "PAGE", page)
    monkeypatch.setattr(compile_table, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(compile_table, "child", lambda *args: dtypes)
    monkeypatch.setattr(launches, "collect", lambda *args: EVERY["float16"])
    assert compile_table.main(["--triton", "2.1.0", "--dtype", "float16", "--case", "sd15:512x512"]) == 1
    assert "nothing compiles: Triton 2.1.0, capability 75, float16" in capsys.readouterr().err
    text = page.read_text(encoding="utf-8")
    assert text.startswith("head\n") and text.endswith("foot\n") and "old" not in text
    assert "| 2.1.0 | 2.1 | 0 of 1, not layer_norm.layer_norm_kernel |" in text
    assert json.loads((tmp_path / "results.json").read_text())["2.1.0"]["cases"] == {"float16": ["sd15:512x512"]}


def test_the_versions_that_compile_nothing():
    results = {"2.1.0": {"float16": {"75": row(2), "80": row(0)}}, "3.0.0": {"float16": {"75": row(1)}}}
    assert compile_table.nothing_compiled(results) == ["Triton 2.1.0, capability 80, float16"]


def test_a_launch_as_json():
    kernel = SimpleNamespace(
        arg_names=["x", "rows", "one", "many", "scale", "BLOCK", "PDL"],
        do_not_specialize=["rows"],
        fn=test_a_launch_as_json,
    )
    options = {"launch_pdl": True, "enable_fp_fusion": True}
    launch = Launch(kernel, (torch.float16, 32, 1, 2**40, 0.5), {"BLOCK": 64, "PDL": True, **options})
    told = launches.described(launch)
    assert told["types"] == {"x": "*fp16", "rows": "i32", "one": "i32", "many": "i64", "scale": "fp32"}
    assert told["constants"] == {"BLOCK": 64, "one": 1} and told["divisible"] == ["x", "many"]
    assert (told["home"], told["name"]) == (__name__, "test_a_launch_as_json")
    with pytest.raises(TypeError, match="scale = 'a'"):
        launches.described(launch._replace(args=(*launch.args[:4], "a")))


@pytest.mark.skipif(not triton_runtime.AVAILABLE, reason="needs Triton")
def test_a_tiny_unet_launches_kernels_for_every_card():
    found = launches.collect(["tiny-sd15:64x64"], "float16")
    assert set(found) == {str(capability) for capability in triton_compiler.SHARED}
    for capability, of in found.items():
        with launches._card(int(capability)):
            refused = triton_runtime.unsupported(torch.device("cuda", 0), torch.float16)
        # Blackwell is too new for old Tritons
        assert refused is None or int(capability) >= 100
        assert any(each["home"].endswith("norm") for each in of) == (refused is None)
