"""What tests compile is kept, and compiled anew where anything has changed."""

from __future__ import annotations

import pytest

from sfast_ext.kernels.backend.cuda_errors import Unavailable

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
