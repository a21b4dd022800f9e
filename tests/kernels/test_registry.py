"""Each kernel is registered, and has a reference case, a benchmark case and a compile case."""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from benchmarks.kernels import cases as benchmark_cases
from sfast_ext import kernels
from sfast_ext.kernels.backend import nvrtc, registry, trial, triton_runtime
from sfast_ext.kernels.backend.registry import Kernel
from sfast_ext.kernels.pointwise import geglu, layer_norm
from sfast_ext.passes.rewrite import is_kernel

from . import reference_cases
from .backend import test_compile, test_dialects, test_nvrtc
from .support import expected, wide

REGISTERED = kernels.registered()
FILES = sorted(Path(kernels.__file__).parent.rglob("*.py"))


def lacking(
    found: Mapping[str, Kernel[..., Any]],
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


def made_up(**parts: Any) -> Kernel[..., Any]:
    kernel = Kernel(layer_norm.launch.function, layer_norm.reference, **parts)
    kernel.name = "made_up"
    return kernel


def of_it(told: list[str]) -> list[str]:
    return [sentence for sentence in told if sentence.startswith("made_up")]


def test_what_a_new_kernel_lacks_is_named() -> None:
    new = made_up(triton_functions=(layer_norm.tile,), cuda_sources=(Source,))
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
    (sentence,) = of_it(lacking({**REGISTERED, "made_up": made_up()}, *more))
    assert sentence.startswith("made_up launches nothing that its record names")
    assert of_it(lacking({**REGISTERED, "made_up": made_up(needs_triton=False)}, *more)) == []


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


def test_a_kernel_is_the_launch_function_of_its_file() -> None:
    for name, kernel in REGISTERED.items():
        home = sys.modules[kernel.__module__]
        assert kernel is home.launch and kernel.reference is home.reference
        assert kernel.__module__.rpartition(".")[2] == kernel.reference.__module__.rpartition(".")[2] == name
        assert inspect.signature(kernel).parameters.keys() == inspect.signature(kernel.reference).parameters.keys()
        assert kernel.fallback in (None, getattr(home, "fallback", None))
        assert all(used is REGISTERED[used.name] for used in kernel.uses)


def test_a_kernel_is_known_by_its_identity() -> None:
    kernel = geglu.launch
    assert registry.of(kernel) is kernel and is_kernel(kernel)
    for other in (geglu, kernel.function, geglu.reference, torch.add, object(), "geglu"):
        assert registry.of(other) is None and not is_kernel(other)
    assert copy.copy(kernel) is copy.deepcopy(kernel) is pickle.loads(pickle.dumps(kernel)) is kernel
    graph = fx.Graph()
    node = graph.call_function(kernel, (graph.placeholder("x"),), {"gate_first": True})
    graph.output(node)
    assert node.name == "geglu"
    for module in (fx.GraphModule({}, graph), copy.deepcopy(fx.GraphModule({}, graph))):
        assert [n.target for n in module.graph.nodes if n.op == "call_function"] == [kernel]
        assert torch.equal(module(torch.ones(2, 4)), geglu.reference(torch.ones(2, 4), True))


def test_every_triton_function_is_in_a_record() -> None:
    named = {plain(f).__name__ for kernel in REGISTERED.values() for f in kernel.triton_functions}
    written = {name for _, name in test_dialects.entries({f.stem: f.read_text(encoding="utf-8") for f in FILES})}
    assert written - named == {plain(trial.trial_kernel).__name__} and named <= written


def test_every_source_is_in_a_record_and_in_the_page_of_kernels() -> None:
    written = {file.stem for file in nvrtc.SOURCES.glob("*.cu")}
    named = {source.name for kernel in REGISTERED.values() for source in kernel.cuda_sources}
    assert written - named == {"copies"} and named <= written
    page = (nvrtc.SOURCES.parent / "docs" / "kernels.md").read_text(encoding="utf-8")
    missing = [name for name in sorted(written) if f"`csrc/{name}.cu`" not in page]
    assert not missing, f"docs/kernels.md does not name `csrc/{missing[0]}.cu`"


def test_a_name_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    with pytest.raises(ValueError, match="geglu"):
        registry.kernel(geglu.reference)(geglu.launch.function)
    made = registry.kernel(geglu.reference)(made_here)
    assert registry.registered()["test_registry"] is made
    assert registry.kernel(geglu.reference, part=True)(made_here).name == "test_registry"


def made_here(x: Any) -> Any:
    registry.require(None, "too long" if len(x) > 2 else None)
    return "launched"


def reference_here(x: Any) -> Any:
    return "by the reference"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_declined", Counter())


def test_what_is_declined_runs_by_the_fallback_and_is_counted(counted: None) -> None:
    kernel = Kernel(made_here, reference_here)
    assert [kernel("a"), kernel("abc"), kernel(x="abc")] == ["launched", *["by the reference"] * 2]
    with triton_runtime.dry_run():
        assert kernel("abc") == "by the reference"
    assert registry.declined() == {"test_registry": {"too long": 2}}
    assert Kernel(made_here, reference_here, fallback=lambda x: x)("abc") == "abc"


@pytest.mark.parametrize(
    ("record", "wanted"), [({}, "by the reference"), ({"portable": True}, None), ({"part": True}, None)]
)
def test_without_cuda_its_library_runs_or_the_caller_decides(record: Any, wanted: str | None, counted: None) -> None:
    def unavailable(x: Any) -> Any:
        raise nvrtc.Unavailable("no compiler")

    kernel = Kernel(unavailable, reference_here, **record)
    if wanted is None:
        with pytest.raises(nvrtc.Unavailable):
            kernel("a")
        assert registry.declined() == {}
    else:
        assert kernel("a") == wanted
        assert registry.declined() == {"test_registry": {"CUDA C++ does not compile or launch here": 1}}


@pytest.mark.skipif(kernels.interpreted(), reason="launches are not references there")
@pytest.mark.parametrize("name", sorted(REGISTERED))
def test_each_kernel_says_why_it_declines(name: str, counted: None) -> None:
    REGISTERED[name](*reference_cases.CASES[name](torch.device("cpu")))
    ((reason, count),) = registry.declined()[name].items()
    assert reason and count == 1


@pytest.mark.parametrize("name", sorted(REGISTERED))
def test_a_launch_computes_its_reference(name, device) -> None:
    kernel, args = REGISTERED[name], reference_cases.CASES[name](device)
    wanted = expected(kernel, *args)
    outputs = kernel(*args)
    if not isinstance(outputs, (tuple, list)):
        outputs, wanted = (outputs,), (wanted,)
    for output, target in zip(outputs, wanted, strict=True):
        assert output.shape == target.shape
        target = wide(target)
        error = (wide(output) - target).norm() / target.norm()
        # of a sum that was rounded to half precision, some codes are the next
        most = 1e-2 if output.dtype == torch.int8 else 2e-3
        assert error < most, f"{name}: relative error {error:.1e}"
