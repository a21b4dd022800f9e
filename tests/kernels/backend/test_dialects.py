"""The Triton that is installed compiles something, and every kernel is among what test_compile.py compiles."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from benchmarks.compile_table import compiler as triton_compiler
from sfast_ext import kernels
from sfast_ext.kernels.backend import triton_runtime
from sfast_ext.kernels.pointwise import layer_norm

from . import test_compile

HOMES = sorted(Path(kernels.__file__).parent.rglob("*.py"))


def entries(texts: dict[str, str]) -> set[tuple[str, str]]:
    """Module and name of the functions under `jit` that none of them calls."""
    found = [
        (home, node)
        for home, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and is_jit(node)
    ]
    called = {
        node.func.id
        for _, function in found
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return {(home, function.name) for home, function in found if function.name not in called}


def is_jit(node: ast.FunctionDef) -> bool:
    return any(
        ast.unparse(decorator).partition("(")[0].rpartition(".")[2] == "jit" for decorator in node.decorator_list
    )


def test_a_kernel_that_none_calls_is_an_entry():
    texts = {
        "a": "@jit()\ndef f(x): return g(x) + k(x)\n@jit()\ndef g(x): return x\n@triton.jit\ndef h(x): pass\n",
        "b": "@jit(do_not_specialize=[])\ndef k(x): pass\n@jit()\ndef m(x): pass\ndef plain(): m()\n",
    }
    assert entries(texts) == {("a", "f"), ("a", "h"), ("b", "m")}


def test_every_kernel_is_compiled_by_a_test():
    compiled = {(each.__module__.rpartition(".")[2], each.__name__) for each in map(plain, test_compile.COMPILED)}
    written = entries({home.stem: home.read_text(encoding="utf-8") for home in HOMES})
    assert written - compiled == set(), "add these to test_compile.py"
    assert compiled - written == set()


def plain(kernel):
    return getattr(kernel, "fn", kernel)


def test_triton_that_is_installed_imports():
    assert (importlib.util.find_spec("triton") is not None) == triton_runtime.AVAILABLE


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or kernels.interpreted(),
    reason="needs Triton, and TRITON_INTERPRET unset",
)
def test_the_stack_compiles_something_for_each_of_its_capabilities(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = triton_compiler.capabilities(triton_compiler.version())
    assert {75, 80, 86, 89, 90} <= set(found) <= set(triton_compiler.SHARED)
    types = {
        name: "*fp16" if name in test_compile.POINTERS else "i32" for name in layer_norm.layer_norm_kernel.arg_names
    }
    types["eps"] = "fp32"
    for capability in found:
        ptx, _ = triton_compiler.compiled(layer_norm.layer_norm_kernel, types, test_compile.NORM, capability)
        assert f".target sm_{capability}" in ptx
