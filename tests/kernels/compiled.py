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
        self._folder.mkdir(parents=True, exist_ok=True)
        # another worker may write it too
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
            file.write(log.encode() + b"\0" + code)
        os.replace(file.name, kept)
        return code, log


def build(name: str, architecture: str, constants: dict[str, int]) -> tuple[bytes, str]:
    """`nvrtc.build` of a file of csrc."""
    kept = Kept(nvrtc.loaded_nvrtc(), FOLDER / "nvrtc")
    with mock.patch.object(nvrtc, "loaded_nvrtc", lambda: kept):
        return nvrtc.build((nvrtc.SOURCES / f"{name}.cu").read_bytes(), architecture, constants)
