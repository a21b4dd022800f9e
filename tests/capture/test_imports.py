from __future__ import annotations

import builtins
import importlib
import sys
import threading

import pytest
import torch

from sfast_ext.capture import fake_trace, imports

X = torch.randn(2, 4)
MAKES = "import torch\nSCALE = torch.tensor(2.0)\ndef scaled(x, by=torch.ones(4)):\n    return x * by\n"


@pytest.fixture
def library(monkeypatch, tmp_path):
    """A package `late`, not imported yet, whose modules make tensors."""
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "__init__.py").write_text("")
    (tmp_path / "late" / "scales.py").write_text(MAKES)
    (tmp_path / "late" / "front.py").write_text("from .scales import SCALE, scaled\nimport late.back\n")
    (tmp_path / "late" / "back.py").write_text(MAKES)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "late"]:
        del sys.modules[name]


def statement(x):
    from late.scales import scaled

    return [scaled(x)]


def call(x):
    return [importlib.import_module("late.front").scaled(x)]


def relative(x):
    return [importlib.import_module(".front", "late").scaled(x)]


def submodule(x):
    from late import scales

    return [scales.scaled(x)]


def missing(x):
    try:
        import late.gone  # noqa: F401
    except ModuleNotFoundError:
        from late.scales import scaled
    return [scaled(x)]


@pytest.mark.parametrize("forward", [statement, call, relative, submodule, missing])
def test_what_a_forward_imports_keeps_its_tensors(library, forward):
    with torch.no_grad():
        graph = fake_trace.record(forward, [X]).graph
    loaded = [module for name, module in sys.modules.items() if name.startswith("late.") and hasattr(module, "scaled")]
    assert loaded
    for module in loaded:
        assert type(module.SCALE) is torch.Tensor and type(module.scaled.__defaults__[0]) is torch.Tensor
    # nothing that the modules made, but what the forward read
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.ops.aten.mul.Tensor]


def test_an_import_that_began_before_is_finished_where_it_began(library):
    """Its lock is this thread's: another would wait for it forever."""
    with imports.in_other_thread():
        from importlib._bootstrap import _gcd_import

        assert _gcd_import("late.front").late.back.SCALE == 2


def test_other_threads_import_as_ever(library):
    executed_by = []
    with imports.in_other_thread():
        thread = threading.Thread(target=lambda: executed_by.append(__import__("late.scales").scales.SCALE))
        thread.start()
        thread.join()
    assert executed_by == [2]


def test_nothing_stays_replaced(monkeypatch):
    before = builtins.__import__, importlib.import_module
    with imports.in_other_thread(), imports.in_other_thread():
        assert builtins.__import__ is not before[0]
    assert (builtins.__import__, importlib.import_module) == before
    with pytest.raises(ZeroDivisionError), imports.in_other_thread():
        1 / 0
    assert (builtins.__import__, importlib.import_module) == before


def test_who_replaced_it_before_sees_each_import(monkeypatch):
    seen = []
    original = builtins.__import__

    def theirs(name, *args, **kwargs):
        seen.append(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", theirs)
    with imports.in_other_thread():
        from json import loads
    assert loads is sys.modules["json"].loads and "json" in seen


def test_who_replaces_it_meanwhile_is_left_alone(monkeypatch):
    monkeypatch.setattr(builtins, "__import__", builtins.__import__)
    with imports.in_other_thread():
        inner = builtins.__import__

        def theirs(*args, **kwargs):
            return inner(*args, **kwargs)

        builtins.__import__ = theirs
    assert builtins.__import__ is theirs
    import json

    assert json is sys.modules["json"]
