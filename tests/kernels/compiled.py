"""What tests compile, kept between runs of the suite: nothing is compiled again that has not changed."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from sfast_ext.kernels.backend import nvrtc

FOLDER = Path(__file__).resolve().parents[2] / ".pytest_cache" / "compiled"
TRITON = FOLDER / "triton"
"""For $TRITON_CACHE_DIR: Triton's keys have its version, the source of a kernel and all options."""


def keep(file: Path, content: bytes) -> None:
    """Write a file whole or not at all: another worker may look for it, or write it too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as partly:
        partly.write(content)
    os.replace(partly.name, file)


class Kept:
    """NVRTC, which compiles what it has not compiled before.

    Args:
        compiler: an `nvrtc_library.Nvrtc`.
        folder: with a file for each program.
    """

    def __init__(self, compiler: Any, folder: Path) -> None:
        self._compiler, self._folder = compiler, folder

    def compile(self, source: bytes, headers: dict[bytes, bytes], options: list[str]) -> tuple[bytes, str]:
        """As `Nvrtc.compile`. What does not compile is not kept."""
        given = repr((self._compiler.version(), source, sorted(headers.items()), options))
        kept = self._folder / hashlib.sha256(given.encode()).hexdigest()
        if kept.exists():
            log, _, code = kept.read_bytes().partition(b"\0")
            return code, log.decode()
        code, log = self._compiler.compile(source, headers, options)
        keep(kept, log.encode() + b"\0" + code)
        return code, log


def build(name: str, architecture: str, constants: dict[str, int]) -> tuple[bytes, str]:
    """`nvrtc.build` of a file of csrc."""
    kept = Kept(nvrtc.loaded_nvrtc(), FOLDER / "nvrtc")
    with mock.patch.object(nvrtc, "loaded_nvrtc", lambda: kept):
        return nvrtc.build((nvrtc.SOURCES / f"{name}.cu").read_bytes(), architecture, constants)
