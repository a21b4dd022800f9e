"""What tests compile is kept, and compiled anew if anything has changed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sfast_ext.kernels.backend import nvrtc
from sfast_ext.kernels.backend.cuda_driver import Unavailable

from . import cuda_on_cpu
from .compiled import Kept


class Compiler:
    """Counts what it compiles."""

    def __init__(self, number: tuple[int, int] = (13, 0)) -> None:
        self.number, self.asked = number, 0

    def version(self) -> tuple[int, int]:
        return self.number

    def compile(self, source: bytes, headers: dict[bytes, bytes], options: list[str]) -> tuple[bytes, str]:
        self.asked += 1
        if b"wrong" in source:
            raise Unavailable("wrong")
        return source + b"\0code", f"log of {options}"


def test_tests_compile_what_has_changed_alone(tmp_path):
    compiler = Compiler()
    kept = Kept(compiler, tmp_path)
    given = b"a", {b"h": b"1"}, ["-O"]
    for _ in range(2):
        assert kept.compile(*given) == (b"a\0code", "log of ['-O']")
    assert compiler.asked == 1
    for other in ((b"b", *given[1:]), (b"a", {b"h": b"2"}, ["-O"]), (b"a", {b"h": b"1"}, ["-O", "-D"])):
        kept.compile(*other)
    assert compiler.asked == 4
    newer = Compiler((13, 1))
    Kept(newer, tmp_path).compile(*given)
    assert newer.asked == 1
    for _ in range(2):
        with pytest.raises(Unavailable):
            kept.compile(b"wrong", {}, [])
    assert compiler.asked == 6


def test_a_kernel_for_the_cpu_is_compiled_anew_if_a_file_of_csrc_has_changed(monkeypatch, tmp_path):
    asked = []

    def compile(program, library):
        asked.append(library)
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()

    def again(constant=1):
        for cached in (cuda_on_cpu.compiled, cuda_on_cpu._all_else):
            cached.cache_clear()
        cuda_on_cpu.compiled("a", (("N", constant),))
        return len(asked)

    (tmp_path / "a.cu").write_text("one")
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path)
    monkeypatch.setattr(cuda_on_cpu, "FOLDER", tmp_path / "kept")
    monkeypatch.setattr(cuda_on_cpu, "COMPILER", "true")
    monkeypatch.setattr(cuda_on_cpu, "_compile", compile)
    monkeypatch.setattr(cuda_on_cpu.ctypes, "CDLL", lambda name: SimpleNamespace(launch=name))
    try:
        assert [again(), again(), again(2)] == [1, 1, 2]
        (tmp_path / "a.cu").write_text("two")
        assert again() == 3
        (tmp_path / "a.h").write_text("#pragma once")
        assert [again(), again()] == [4, 4]
    finally:
        for cached in (cuda_on_cpu.compiled, cuda_on_cpu._all_else):
            cached.cache_clear()
