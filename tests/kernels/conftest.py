"""Where the kernels run.

Without a card, in Triton's interpreter: `TRITON_INTERPRET=1 pytest -m interpreter tests/kernels`, a run of its own,
since Triton reads the variable when it is first imported. On a card: `pytest -m gpu`, without the variable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sfast_ext import kernels
from sfast_ext.kernels.backend import nvrtc, precompile, triton_runtime
from sfast_ext.kernels.backend.cuda_libraries import Bindings
from sfast_ext.kernels.conv import conv2d
from sfast_ext.kernels.linear import linear_geglu
from sfast_ext.tools.lib.exact import without_tf32

from .support import finish


@pytest.fixture(
    params=[
        pytest.param("interpreter", marks=pytest.mark.interpreter),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN, so that what a kernel leaves unwritten shows."""
    empty = torch.empty

    def poisoned_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned_empty)


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """The interpreter without what it does again and again to no effect.

    - Half of an operation on integers is to look for an overflow, of which it then says nothing, since no kernel is in
      debug mode.
    - It makes a table of all types to look up one.
    - Each launch, and each function that a kernel calls, replaces the functions of `triton.language` by the
      interpreter's, one by one. Here nothing else runs: they are replaced once for each module with kernels.
    """
    if not kernels.interpreted():
        return
    from triton.runtime import interpreter

    options = getattr(interpreter.interpreter_builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and not getattr(options, "debug", True):
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    original, tl = interpreter._get_np_dtype, interpreter.tl
    remembered = functools.lru_cache(maxsize=None)(original)

    def np_dtype(kind: Any) -> Any:
        kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
        # a pointer has no hash
        return original(kind) if isinstance(kind, tl.pointer_type) else remembered(kind)

    interpreter._get_np_dtype = np_dtype
    patch_lang, replaced = interpreter._patch_lang, set()

    def patch_lang_once(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module not in replaced:
            replaced.add(module)
            patch_lang(fn)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_lang_once


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def no_tf32() -> Iterator[None]:
    """In float32, products and convolutions are not rounded."""
    with without_tf32():
        yield


@pytest.fixture
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The grid, arguments and constants of launches of the module's `kernel`, of which there are none then."""
    found: list[Any] = []

    def launch_kernel(source: Any, grid: Any, *args: Any, **constants: Any) -> None:
        found.append((grid, args, constants))

    monkeypatch.setattr(request.module.kernel, "launch_kernel", launch_kernel)
    return found


class Nvrtc:
    """What it is asked for, in order, and how it answers."""

    def __init__(self):
        self.asked = []
        self.answer = lambda constants: b"code"

    def build(self, source, architecture, constants):
        assert architecture == "sm_90a"
        self.asked.append(constants)
        return self.answer(constants), ""


@pytest.fixture
def nvrtc_calls(monkeypatch, tmp_path):
    """Stand-ins of NVRTC and a driver, with nothing compiled."""
    compiler = Nvrtc()
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(object(), SimpleNamespace(version=lambda: (13, 0))))
    monkeypatch.setattr(nvrtc, "build", compiler.build)
    monkeypatch.setattr(
        nvrtc.Source, "_load", lambda self, index, given, code: code or self.compiled(nvrtc.architecture(index), given)
    )
    for module in (conv2d, linear_geglu):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
        monkeypatch.setattr(module._SOURCE, "_functions", {})
        monkeypatch.setattr(module._SOURCE, "_failed", set())
        monkeypatch.setattr(module._SOURCE, "kept", True)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(precompile, "_done", set())
    monkeypatch.setattr(precompile, "_background", precompile.BackgroundCompiler())
    monkeypatch.setattr(precompile, "_PAUSE", 0)
    monkeypatch.setattr(precompile, "_LOOK", 0.01)
    yield compiler
    compiler.answer = lambda constants: b"code"
    finish()
