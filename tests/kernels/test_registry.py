"""Each kernel is registered, and has a reference case, a benchmark case and a compile case."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels import cases as benchmark_cases
from sfast_ext import kernels
from sfast_ext.kernels.backend import nvrtc, registry, trial
from sfast_ext.kernels.backend.registry import Kernel
from sfast_ext.kernels.pointwise import geglu, layer_norm

from . import reference_cases
from .backend import test_compile, test_dialects, test_nvrtc
from .support import expected, wide

REGISTERED = kernels.registered()
FILES = sorted(Path(kernels.__file__).parent.rglob("*.py"))


def lacking(
    found: Mapping[str, Kernel],
    references: Collection[str],
    benchmarks: Collection[str],
    functions: Collection[Any],
    sources: Collection[str],
    tests: Collection[str],
) -> list[str]:
    """What kernels lack, in a sentence each.

    Args:
        found: the kernels by name.
        references: names with a reference case.
        benchmarks: names with a benchmark case.
        functions: of Triton, with a compile case.
        sources: of csrc, with a compile case.
        tests: names that a file of tests imports.
    """
    told = []
    compiled = [plain(function) for function in functions]
    for name, kernel in found.items():
        if name not in references:
            told.append(f"{name} has no reference case: add it to tests/kernels/reference_cases.py")
        if name not in benchmarks:
            told.append(f"{name} has no benchmark case: add it to benchmarks/kernels/cases.py")
        if name not in tests:
            told.append(f"{name} has no tests: write test_{name}.py in the folder of tests/kernels for its room")
        for function in map(plain, kernel.triton_functions):
            if function not in compiled:
                told.append(f"{name} has no compile case for {function.__name__}: add it to backend/test_compile.py")
        for source in kernel.cuda_sources:
            if source.name not in sources:
                told.append(f"{name} has no compile case for {source.name}.cu: add it to backend/test_nvrtc.py")
        if kernel.needs_triton and not kernel.triton_functions and not kernel.cuda_sources:
            told.append(
                f"{name} launches nothing that its record names: add it to its triton_functions or cuda_sources"
            )
    for what, names in (("reference", references), ("benchmark", benchmarks)):
        told += [f"a {what} case is of {name}, which is no kernel" for name in names if name not in found]
    return told


def plain(function: Any) -> Any:
    """The Python function of one under `triton.jit`."""
    return getattr(function, "fn", function)


def all_cases() -> tuple[Collection[Any], ...]:
    compiled = test_compile.COMPILED, test_nvrtc.COMPILED
    return reference_cases.CASES, benchmark_cases.CASES, *compiled, imported_by_tests()


def imported_by_tests() -> set[str]:
    """What the tests in the rooms of kernels import from `sfast_ext.kernels`."""
    found = set()
    for file in Path(__file__).parent.glob("*/test_*.py"):
        if file.parent.name != "backend":
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sfast_ext.kernels."):
                    found |= {alias.name for alias in node.names}
    return found


def test_no_kernel_lacks_a_case() -> None:
    told = lacking(REGISTERED, *all_cases())
    assert not told, "\n".join(told)
    assert set(REGISTERED) == set(reference_cases.CASES) == set(benchmark_cases.CASES)


class Source:
    name = "made_up"


def made_up(name: str, **parts: Any) -> Kernel:
    return Kernel(name, layer_norm.reference, layer_norm.launch, **parts)


def of_it(told: list[str]) -> list[str]:
    return [sentence for sentence in told if sentence.startswith("made_up")]


def test_what_a_new_kernel_lacks_is_named() -> None:
    new = made_up("made_up", triton_functions=(layer_norm.tile,), cuda_sources=(Source,))
    told = of_it(lacking({**REGISTERED, "made_up": new}, *all_cases()))
    assert [sentence.partition(":")[0] for sentence in told] == [
        "made_up has no reference case",
        "made_up has no benchmark case",
        "made_up has no tests",
        "made_up has no compile case for tile",
        "made_up has no compile case for made_up.cu",
    ]
    assert all(": add it to" in sentence or ": write" in sentence for sentence in told)
    more = ["made_up"], ["made_up"], [layer_norm.tile], ["made_up"], ["made_up"]
    assert of_it(lacking({**REGISTERED, "made_up": new}, *map(list.__add__, map(list, all_cases()), more))) == []


def test_a_kernel_that_names_nothing_it_launches_is_told() -> None:
    references, benchmarks, functions, sources, tests = all_cases()
    more = [*references, "made_up"], [*benchmarks, "made_up"], functions, sources, [*tests, "made_up"]
    (sentence,) = of_it(lacking({**REGISTERED, "made_up": made_up("made_up")}, *more))
    assert sentence.startswith("made_up launches nothing that its record names")
    assert of_it(lacking({**REGISTERED, "made_up": made_up("made_up", needs_triton=False)}, *more)) == []


def test_a_case_of_no_kernel_is_told() -> None:
    rest = {name: kernel for name, kernel in REGISTERED.items() if name != "geglu"}
    told = lacking(rest, *all_cases())
    assert "a reference case is of geglu, which is no kernel" in told
    assert "a benchmark case is of geglu, which is no kernel" in told


def test_every_file_with_a_launch_and_a_reference_is_registered() -> None:
    written = set()
    for file in FILES:
        defined = {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
        if {"reference", "launch"} <= defined:
            written.add(file.stem)
    assert written == set(REGISTERED)


def test_a_record_is_that_of_its_file() -> None:
    for name, kernel in REGISTERED.items():
        assert kernel.launch.__module__.rpartition(".")[2] == kernel.reference.__module__.rpartition(".")[2] == name
        assert registry.of(kernel.launch) is kernel and registry.of(kernel.reference) is kernel
        assert all(used is REGISTERED[used.name] for used in kernel.uses)
    assert registry.of(geglu) is geglu.KERNEL
    assert registry.of(torch.add) is None and registry.of(torch) is None and registry.of(object()) is None


def test_every_triton_function_is_in_a_record() -> None:
    named = {plain(f).__name__ for kernel in REGISTERED.values() for f in kernel.triton_functions}
    written = {name for _, name in test_dialects.entries({f.stem: f.read_text(encoding="utf-8") for f in FILES})}
    assert written - named == {plain(trial.trial_kernel).__name__} and named <= written


def test_every_source_is_in_a_record_and_in_the_page_of_kernels() -> None:
    written = {file.stem for file in nvrtc.SOURCES.glob("*.cu")}
    named = {source.name for kernel in REGISTERED.values() for source in kernel.cuda_sources}
    assert written - named == {"copies"} and named <= written
    page = (nvrtc.SOURCES.parent / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert [name for name in sorted(written) if f"`csrc/{name}.cu`" not in page] == []


def test_a_name_and_a_file_are_registered_once(monkeypatch) -> None:
    monkeypatch.setattr(registry, "_by_module", dict(registry._by_module))
    with pytest.raises(ValueError, match="geglu"):
        registry.register(Kernel("another", geglu.reference, geglu.launch))
    with pytest.raises(ValueError, match="geglu"):
        registry.register(Kernel("geglu", lacking, lacking))
    made = registry.register(Kernel("another", lacking, lacking))
    assert registry.of(lacking) is made and registry.known()["another"] is made


@pytest.mark.parametrize("name", sorted(REGISTERED))
def test_a_launch_computes_its_reference(name, device) -> None:
    kernel, args = REGISTERED[name], reference_cases.CASES[name](device)
    wanted = expected(kernel, *args)
    outputs = kernel.launch(*args)
    if not isinstance(outputs, tuple):
        outputs, wanted = (outputs,), (wanted,)
    for output, target in zip(outputs, wanted, strict=True):
        assert output.shape == target.shape
        error = (wide(output) - target).norm() / target.norm()
        assert error < 2e-3, f"{name}: relative error {error:.1e}"
