"""The benchmark of the kernels, at small shapes on a CPU: what is compared computes the same."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.kernels import cases as kernel_cases
from benchmarks.kernels import compositions, quantisers, transformers
from benchmarks.kernels import run as bench_kernels


@pytest.fixture(autouse=True)
def small(monkeypatch):
    shapes = {
        "NORM_ROWS": [(6, 32)],
        "IMAGES": [(64, 4)],
        "GATED": [(6, 32)],
        "HEADS": [(2, 6, 5, 8)],
        "PROMPTED": [(2, 6, 3, 8, 5)],
        "GATED_LINEARS": [(6, 16, 8)],
        "LINEARS": [(6, 16, 8)],
        "NORMED_LINEARS": [(6, 16, 8), (7, 24, 8)],
        "JOINED": [(64, 32, 4)],
        "SMALL": [(32, 3)],
        "CONVOLUTIONS": [(2, 16, 4, 5, 24)],
        "NARROW_CONVOLUTIONS": [(2, 4, 6, 5, 32), (2, 32, 6, 5, 4)],
        "NORMED_CONVOLUTIONS": [(2, 16, 4, 5, 64)],
        "RESIDUAL_CONVOLUTIONS": [(16, 4, 24)],
    }
    for name, values in shapes.items():
        monkeypatch.setattr(kernel_cases, name, values)
    of_quantisers = {
        "ROWS": [(6, 192, 64)],
        "NORM_ROWS": [(6, 32)],
        "BLOCKS": [(64, 1)],
        "NORM_IMAGES": [(64, 4)],
        "JOINED": [(64, 32, 4)],
    }
    for name, values in of_quantisers.items():
        monkeypatch.setattr(quantisers, name, values)
    heads = [(2, 5, 3, 16, form) for form in ("complex", "halves", "neighbours")]
    rows_of = {"ROWS": [(2, 5, 32)], "HEADS": heads, "GATED": [(6, 16)], "GELU": [(6, 16, 8)]}
    for name, rows in {**rows_of, "GELU8": [(6, 64, "none")]}.items():
        monkeypatch.setattr(transformers, name, rows)
    torch.manual_seed(0)


def all_cases():
    return list(kernel_cases.cases(torch.float32, set(kernel_cases.CASES), "cpu"))


def flat(out):
    return out if isinstance(out, tuple) else (out,)


def test_every_kernel_has_cases_and_all_ways_agree():
    cases = all_cases()
    names = {case.kernel for case in cases}
    assert set(kernel_cases.CASES) <= names and "group_norm.loop" in names
    for case in cases:
        assert bench_kernels.error(case) < 1e-5, case.kernel
        for one, other in zip(flat(case.torch()), flat(case.target())):
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-4)
        if case.composition is None:
            assert case.kernel.startswith("group_norm.")
            continue
        function, args, kwargs = case.composition
        for one, other in zip(flat(function(*args, **kwargs)), flat(case.target())):
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-4)
        assert case.bytes > 0


def test_a_normed_product_has_records_of_its_own_once(monkeypatch):
    launched = []
    module = kernel_cases.linear_layer_norm
    monkeypatch.setattr(module, "record_count", lambda rows, columns, depth, device: rows * columns + depth)
    monkeypatch.setattr(module, "launch", lambda *args: launched.append((args[0], args[-1])))
    one, other = kernel_cases.cases(torch.float32, {"linear_layer_norm"}, "cpu")
    for case in (one, other, one):
        case.ours()
    (x, records), (y, others), (_, again) = launched
    assert (x.shape, y.shape) == ((6, 8), (7, 8)) and again is records
    assert records.shape == (6 * 16 + 8,) and others.shape == (7 * 24 + 8,)
    assert records.dtype == torch.int64 and not records.any()


@pytest.mark.long
def test_torch_compile_is_a_third_column(monkeypatch, tmp_path, capsys):
    asked = []

    def compile_(function, **options):
        asked.append(options)
        if function is compositions.geglu:
            raise RuntimeError("it refuses\nfor a reason")
        return function

    times = iter(range(10, 10_000))
    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_kernels.machine, "describe", lambda: {"gpu": "a GPU", "commit": "aaaa"})
    monkeypatch.setattr(bench_kernels, "cases", lambda dtype, only: kernel_cases.cases(torch.float32, only, "cpu"))
    monkeypatch.setattr(
        bench_kernels,
        "measure",
        lambda call, **options: {name: float(next(times)) for name in ("median", "p20", "p80")},
    )
    file = tmp_path / "kernels.json"
    arguments = ["bench_kernels", "--warm", "--out", str(file)]
    monkeypatch.setattr("sys.argv", arguments)
    assert bench_kernels.main() == 0
    result = json.loads(file.read_text())
    assert result["gpu"] == "a GPU" and result["commit"] == "aaaa"
    rows = {row["kernel"]: row for row in result["rows"]}
    assert rows["geglu"]["compile_failed"] == "RuntimeError: it refuses" and "compile_us" not in rows["geglu"]
    assert "compile_us" not in rows["group_norm.loop"]
    assert rows["layer_norm"]["compile_us"]["median"] > rows["layer_norm"]["torch_us"]["median"]
    assert all(options == {"fullgraph": True, "dynamic": False} for options in asked)
    assert "it refuses" in capsys.readouterr().out
    asked.clear()
    monkeypatch.setattr("sys.argv", [*arguments, "--no-compile"])
    assert bench_kernels.main() == 0 and not asked
