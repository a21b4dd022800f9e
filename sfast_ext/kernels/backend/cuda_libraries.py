"""The CUDA driver and NVRTC of this machine: finds and loads both.

Nothing has to be installed: the driver is there, and NVRTC comes with torch. It is in torch/lib on Windows and in older
Linux wheels (there with a hash in its name), in NVIDIA's packages next to torch in newer ones. Files are listed, not
named: their versions differ. NVRTC opens its built-ins by their plain name, which fails if their folder is not on the
loader's path; so they are loaded first, by full path.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from sfast_ext.kernels.backend.cuda_driver import Driver
from sfast_ext.kernels.backend.nvrtc_library import Nvrtc

logger = logging.getLogger("sfast_ext")

# the second choices of newer wheels ("libnvrtc.alt.so.12") do not match
_NVRTC = re.compile(r"nvrtc64_(\d+)_\d+\.dll|libnvrtc(?:-[0-9a-f]+)?\.so(?:\.(\d+)[\d.]*)?", re.I)
_BUILTINS = re.compile(r"nvrtc-builtins64_\d+\.dll|libnvrtc-builtins(?:-[0-9a-f]+)?\.so[\d.]*", re.I)
_DRIVER = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"


class NotFound(RuntimeError):
    """A library is not there or does not load; the message says which, for the user."""


@functools.lru_cache(maxsize=None)
def driver() -> ctypes.CDLL:
    """The library of NVIDIA's driver.

    Raises:
        NotFound: it does not load.
    """
    return _loaded(_DRIVER)


@functools.lru_cache(maxsize=None)
def nvrtc() -> ctypes.CDLL:
    """The NVRTC of torch's CUDA version, or the newest one next to a torch without CUDA.

    Raises:
        NotFound: there is none, or it does not load.
    """
    reasons = []
    for file in candidates(folders()):
        try:
            _load_builtins(file.parent)
            return _loaded(str(file))
        except NotFound as exc:
            reasons.append(str(exc))
    raise NotFound("; ".join(reasons) or "NVRTC was not found next to torch")


def folders() -> list[Path]:
    """Folders that may hold NVRTC, likeliest first."""
    home = Path(torch.__file__).parent
    found = [home / "lib"]
    for root in dict.fromkeys((home.parent, *map(Path, sys.path))):
        # nvidia/cuda_nvrtc/lib, nvidia/cu13/lib; on Windows bin, bin/x86_64
        found += [folder for kind in ("bin/*", "bin", "lib") for folder in sorted(root.glob(f"nvidia/*/{kind}"))]
    # conda; on Windows with the layout of CUDA 13 or without
    inner = ("Library/bin/x64", "Library/bin", "bin", "lib")
    found += [Path(sys.prefix) / folder for folder in inner]
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def candidates(places: Iterable[Path]) -> list[Path]:
    """The NVRTC libraries in some folders, best first: those of torch's CUDA version, then those whose name has none.

    Other major versions are left out, as the driver may not know their code; but not next to a torch without CUDA.
    """
    wanted = int(torch.version.cuda.partition(".")[0]) if torch.version.cuda else None
    found: list[tuple[int | None, Path]] = []
    for file in _listed(places):
        name = _NVRTC.fullmatch(file.name)
        if name is not None:
            # nvrtc64_120_0.dll is of all of CUDA 12; libnvrtc.so.12, but libnvrtc.so.11.2
            found.append((int(name[1][:-1]) if name[1] else int(name[2]) if name[2] else None, file))
    if wanted is None:
        return [file for _, file in sorted(found, key=lambda each: -(each[0] or 0))]
    fitting = [each for each in found if each[0] in (wanted, None)]
    return [file for _, file in sorted(fitting, key=lambda each: each[0] is None)]


def _listed(places: Iterable[Path]) -> Iterator[Path]:
    for folder in places:
        try:
            yield from sorted(folder.iterdir())
        except OSError as exc:
            logger.debug("%s is not searched: %s", folder, exc)


def _load_builtins(folder: Path) -> None:
    for file in _listed([folder]):
        if _BUILTINS.fullmatch(file.name):
            try:
                # globally: NVRTC's own search by name finds what is loaded
                ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
            except OSError as exc:
                logger.debug("%s does not load: %s", file, exc)


def _loaded(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as exc:
        raise NotFound(f"{Path(name).name} does not load ({exc})") from exc


class Bindings(NamedTuple):
    driver: Driver | None
    """None on a machine without one."""
    nvrtc: Nvrtc | None
    """None if it was not found, see `no_nvrtc`."""


@functools.lru_cache(maxsize=None)
def bindings() -> Bindings:
    """What there is."""
    compiler = Nvrtc(nvrtc()) if no_nvrtc() is None else None
    try:
        return Bindings(Driver(driver()), compiler)
    except Exception as exc:  # a library may lack a function
        logger.debug("no CUDA driver: %s", exc)
        return Bindings(None, compiler)


@functools.lru_cache(maxsize=None)
def no_nvrtc() -> str | None:
    """Why there is no NVRTC; None if there is."""
    try:
        Nvrtc(nvrtc()).version()
    except Exception as exc:
        return str(exc)
    return None
