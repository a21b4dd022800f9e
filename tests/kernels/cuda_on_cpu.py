"""Kernels in CUDA C++ on the CPU: compiled by the host's C++ compiler, with csrc/cpu.h in the GPU's place."""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from needs import cpp_compiler, without_compiler

from sfast_ext.kernels import registered
from sfast_ext.kernels.backend import nvrtc, triton_runtime
from sfast_ext.kernels.group_norm import portable

from .compiled import FOLDER, keep

COMPILER = cpp_compiler()
# what csrc/cpu.h includes; most of a compilation would be to read it
_STANDARD = "#include <setjmp.h>\n#include <ucontext.h>\n#include <cmath>\n#include <cstring>\n#include <utility>\n"
# a jump to another stack is no mistake here, which a fortified one takes it for
_OPTIONS = ("-Og", "-std=c++17", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-U_FORTIFY_SOURCE")
# kernels use no C++ library at run time, and to look into it takes a fifth of a small kernel's compilation
_LINKED = ("-nostdlib", "-lgcc", "-lm", "-lc") if sys.platform == "linux" else ()
# g++ leaves a precompiled header aside if an identifier in it was defined before, as TYPE is
_MAIN = """
#include "standard.h"
{constants}
#include "{name}.cu"
extern "C" int launch(void** args, const unsigned* grid, unsigned threads, unsigned bytes) {{
  return cpu::launch({name}, args, grid, threads, bytes);
}}
"""


@functools.lru_cache(maxsize=None)
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="cuda-on-cpu-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    header = folder / "standard.h"
    header.write_text(_STANDARD)
    # precompiled; a compiler that cannot, or does not find it, reads the header itself
    made = [COMPILER, *_OPTIONS, "-x", "c++-header", header, "-o", folder / "standard.h.gch"]
    subprocess.run(made, capture_output=True)  # type: ignore[arg-type]
    return folder


@functools.lru_cache(maxsize=None)
def _all_else() -> str:
    """The compiler, and what each kernel may include."""
    if os.name == "nt":
        pytest.skip("csrc/cpu.h changes stacks as POSIX does")
    if COMPILER is None:
        pytest.skip(without_compiler())
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    headers = [(file.name, file.read_text(encoding="utf-8")) for file in sorted(nvrtc.SOURCES.glob("*.h"))]
    return repr((COMPILER, version, _OPTIONS, _LINKED, _STANDARD, headers))


@functools.lru_cache(maxsize=None)
def compiled(name: str, constants: tuple[tuple[str, int], ...]) -> Any:
    """The kernel of a file of csrc as a function of a table of addresses, grid, threads and bytes."""
    defined = "\n".join(f"#define {key} {value}" for key, value in (("SFAST_CPU", 1), *constants))
    program = _MAIN.format(name=name, constants=defined)
    given = repr((program, (nvrtc.SOURCES / f"{name}.cu").read_text(encoding="utf-8"), _all_else()))
    library = FOLDER / "cpu" / f"{hashlib.sha256(given.encode()).hexdigest()}.so"
    if not library.exists():
        _compile(program, library)
    return ctypes.CDLL(str(library)).launch


def _compile(program: str, library: Path) -> None:
    assert COMPILER is not None
    source, made = _folder() / f"{library.stem}.cpp", _folder() / library.name
    source.write_text(program)
    options = [*_OPTIONS, "-shared", f"-I{nvrtc.SOURCES}"]
    done = subprocess.run([COMPILER, *options, source, "-o", made, *_LINKED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    keep(library, made.read_bytes())


def launch(source: nvrtc.Source, grid: tuple[int, ...], *args: Any, **constants: int) -> None:
    """In the place of `nvrtc.Source._launch`."""
    own, threads, shared = source.prepare(*args, **constants)
    kept = [nvrtc.cell(x) for x in own]
    table = (ctypes.c_void_p * len(kept))(*(ctypes.addressof(x) for x in kept))
    run = compiled(source.name, tuple(sorted(constants.items())))
    assert run(table, (ctypes.c_uint * 3)(*(*grid, 1, 1)[:3]), threads, shared) == 0


def stand_in(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """Within a test, the kernel of a file runs here, as on an Ampere card of two multiprocessors: so few that a block
    takes several blocks of rows."""
    monkeypatch.setattr(nvrtc.Source, "_launch", launch)
    monkeypatch.setattr(nvrtc.Source, "supported", lambda source, device: True)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (8, 6))
    monkeypatch.setattr(module, "multiprocessors", lambda device: 2)


def as_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a test, kernels for any card are launched as on a GPU, by a driver that runs them here."""

    def launched(function: Any, grid: Any, block: Any, shared: int, stream: int, parameters: int) -> None:
        (source, constants), table = function, ctypes.c_void_p(parameters)
        assert block[1:] == (1, 1) and stream == 0
        assert compiled(source.name, tuple(sorted(constants)))(table, (ctypes.c_uint * 3)(*grid), block[0], shared) == 0

    sources = (source for kernel in registered().values() if kernel.portable for source in kernel.cuda_sources)
    portable = {source.name for source in sources if not source.hopper}
    driver = SimpleNamespace(cuLaunchKernel=launched)
    monkeypatch.setattr(nvrtc, "loaded_driver", lambda: driver)
    monkeypatch.setattr(nvrtc.Source, "_function", lambda source, index, constants: (source, constants.items()))
    monkeypatch.setattr(nvrtc.Source, "supported", lambda source, device: source.name in portable)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(nvrtc, "current_stream", lambda index: 0)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (8, 6))


ONE, TWO = ["group_norm_whole"], ["group_norm_statistics", "group_norm_normalise"]
"""The kernels of a group norm in one launch, and in two."""


def group_norms_in(launches: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of one way of a group norm, which is taken from here on whatever the size. Blocks are small, as each
    thread of the GPU is one of the CPU."""
    monkeypatch.setattr(portable, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(portable, "_WHOLE_THREADS", 512)
    monkeypatch.setattr(portable, "_THREADS", 96)
    if launches == 1:
        return ONE
    monkeypatch.setattr(portable, "whole", lambda *args: None)
    return TWO
