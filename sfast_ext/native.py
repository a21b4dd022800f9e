"""The native operations: optional, built when asked for by `python -m sfast_ext build`, never missed.

One C++ file over the cuBLASLt that torch itself runs on. It needs a C++ compiler and CUDA's headers (from a
toolkit or from NVIDIA's wheels), no nvcc: it has no device code. What was built is kept in a folder of the user's,
under the versions it was built for, and is loaded when the first plan asks.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from sfast_ext import cache_folder

SOURCE = Path(__file__).parents[1] / "csrc" / "linear_add.cpp"
MINIMUM_CAPABILITY = (7, 0)
TIMEOUT_S = 600

_HOW = "not built: python -m sfast_ext build"

# The library that was loaded or refused, and why; a process cannot load two, nor take one back.
_loaded: Path | None = None
_error: str | None = None
_failed: Path | None = None


class BuildError(RuntimeError):
    """Why there is no native library, in the compiler's words where it had some."""


def folder() -> Path:
    """Where libraries are kept: $TORCH_EXTENSIONS_DIR, or the user's cache."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen) / "sfast_ext"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sfast_ext"


def path() -> Path:
    """The library for this source, this torch and its CUDA."""
    key = f"{torch.__version__} {torch.version.cuda} {torch.compiled_with_cxx11_abi()} {sys.platform}"
    digest = hashlib.sha256(key.encode() + SOURCE.read_bytes()).hexdigest()[:16]
    return folder() / f"native-{digest}" / "libsfast_ext.so"


def refusal() -> str | None:
    """Why the library is neither loaded nor built, whose folder or file is not the user's alone; else None."""
    return cache_folder.refusal(path(), folder()) if SOURCE.is_file() else None


def load() -> bool:
    """Takes the library in if it was built; nothing is built here, nothing raised. The error is in describe()."""
    global _loaded, _error, _failed
    if _loaded is not None:
        return True
    try:
        library = path()
        # one that did not load will not load at the next plan either
        if library == _failed or not library.is_file() or cache_folder.refusal(library, folder()) is not None:
            return False
        _failed = library
        torch.ops.load_library(str(library))
        torch.ops.sfast_ext.linear_add.default  # noqa: B018  raises where the library did not register it
        _loaded, _error, _failed = library, None, None
    except Exception as exc:
        _error = f"{type(exc).__name__}: {exc}"
    return _loaded is not None


def available(device: torch.device) -> bool:
    """Whether the operations run on tensors of this device; loads the library if it is there."""
    if device.type != "cuda" or torch.version.hip or torch.version.cuda is None:
        return False
    return _capability(device.index) >= MINIMUM_CAPABILITY and load()


def takes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the operations take this type on this device: bfloat16 came with compute capability 8.0."""
    if dtype == torch.bfloat16:
        return available(device) and _capability(device.index) >= (8, 0)
    return dtype == torch.float16 and available(device)


@functools.lru_cache(maxsize=None)
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index) if torch.cuda.is_available() else (0, 0)


def describe() -> dict[str, Any]:
    """built, loaded, path, error: as JSON can carry."""
    try:
        library, missing = path(), None if _loaded else refusal()
    except OSError as exc:
        library, missing = None, f"its source is not here ({exc.filename})"
    built = library is not None and library.is_file()
    return {
        "built": built,
        "loaded": _loaded is not None,
        "path": str(_loaded or library or "") or None,
        "error": _error or missing or (None if built else _HOW),
    }


def build() -> Path:
    """Compiles the library, once for each source and torch; a BuildError tells why it cannot be."""
    global _failed
    if not sys.platform.startswith("linux"):
        raise BuildError("The native operations build on Linux only, as yet.")
    if torch.version.cuda is None:
        raise BuildError(f"This torch ({torch.__version__}) is built without CUDA.")
    if not SOURCE.is_file():
        raise BuildError(f"The source is not here: {SOURCE}")
    library = path()
    try:
        cache_folder.make(library.parent, folder())
    except PermissionError as exc:
        raise BuildError(str(exc)) from exc
    if library.is_file() and refusal() is None:
        return library
    with tempfile.TemporaryDirectory(dir=library.parent) as room:
        made = Path(room) / library.name
        _run(command(made))
        made.chmod(0o700)
        os.replace(made, library)  # two builds at once: either result will do, half a file will not
    _failed = None
    return library


def command(output: Path) -> list[str]:
    """The call of the compiler."""
    loaded = loaded_libraries()
    blas, runtime = (_library(name, loaded) for name in ("cublasLt", "cudart"))
    base = Path(torch.__file__).parent
    home = base / "include"
    return [
        compiler(),
        "-std=c++17",
        "-O2",
        "-fPIC",
        "-shared",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *_each("-isystem", [home, home / "torch" / "csrc" / "api" / "include"]),
        *_headers([blas, runtime]),
        str(SOURCE),
        "-o",
        str(output),
        f"-L{base / 'lib'}",
        "-lc10",
        "-lc10_cuda",
        "-ltorch_cpu",
        "-ltorch",
        # these very files, not what the linker's path has of that name: torch has loaded them already
        str(blas),
        str(runtime),
        f"-Wl,-rpath,{blas.parent}",
    ]


def compiler() -> str:
    """$CXX, or the first C++ compiler in the path."""
    wanted = os.environ.get("CXX")
    for name in (wanted, "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise BuildError("No C++ compiler: none of $CXX, c++, g++, clang++ is in the path.")


def loaded_libraries() -> dict[str, Path]:
    """The shared libraries of this process, by what stands between `lib` and `.so`."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.split(maxsplit=5)[-1]
        if ".so" in name and name.startswith("/"):
            found.setdefault(Path(name).name.removeprefix("lib").partition(".so")[0], Path(name))
    return found


def toolkits() -> list[Path]:
    """CUDA toolkits on this machine, the one that was named first."""
    named = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    found = [Path(name) for name in named if name]
    found += [Path(nvcc).resolve().parents[1]] if nvcc else []
    return [root for root in dict.fromkeys([*found, Path("/usr/local/cuda")]) if root.is_dir()]


def wheels() -> list[Path]:
    """The folders of NVIDIA's wheels: one for each library, or (from CUDA 13) one for all."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return []
    roots = list(spec.submodule_search_locations or []) if spec is not None else []
    return sorted(part for root in roots if Path(root).is_dir() for part in Path(root).iterdir() if part.is_dir())


def _library(name: str, loaded: dict[str, Path]) -> Path:
    """The file of a CUDA library: what torch has loaded, so that one process has one of it."""
    if name in loaded:
        return loaded[name]
    major = (torch.version.cuda or "").partition(".")[0]
    for root in [Path(torch.__file__).parent, *wheels(), *toolkits()]:
        for part in ("lib", "lib64"):
            for file in sorted((root / part).glob(f"lib{name}.so.{major}*")):
                return file
    raise BuildError(f"No lib{name}.so.{major} is loaded, nor in torch, in NVIDIA's wheels or in a CUDA toolkit.")


def _headers(libraries: Iterable[Path]) -> list[str]:
    """Options that lead to CUDA's headers.

    Those beside the libraries are of the same version and come first, then a toolkit of torch's CUDA. What is in
    none of them comes from wherever it is: the wheel of the runtime is without crt/host_defines.h, which changes
    little from version to version; Triton has one too.
    """
    beside = [library.parents[1] / "include" for library in libraries]
    major = (torch.version.cuda or "").partition(".")[0]
    homes = [root / "include" for root in toolkits()]
    others = [*(root / "include" for root in wheels()), *homes, *_triton_headers()]
    near = [*beside, *(home for home in homes if _major(home) == major)]
    first = [part for part in dict.fromkeys(near) if part.is_dir()]
    rest = [part for part in dict.fromkeys(others) if part.is_dir() and part not in first]
    # a wheel of another CUDA may lie beside torch's: never before it
    rest.sort(key=lambda part: _major(part) not in (major, None))
    for header in ("cublasLt.h", "cuda_runtime_api.h", "crt/host_defines.h"):
        if not any((part / header).is_file() for part in (*first, *rest)):
            raise BuildError(
                f"No {header} in a CUDA toolkit or in NVIDIA's wheels. Set CUDA_HOME to a toolkit of CUDA {major}."
            )
    return [*_each("-isystem", first), *_each("-idirafter", rest)]


def _triton_headers() -> list[Path]:
    spec = importlib.util.find_spec("triton")
    roots = list(spec.submodule_search_locations or []) if spec is not None else []
    return [Path(root) / "backends" / "nvidia" / "include" for root in roots]


def _major(include: Path) -> str | None:
    """The major version of the CUDA whose runtime's headers are here, or None."""
    try:
        lines = (include / "cuda_runtime_api.h").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if words[:2] == ["#define", "CUDART_VERSION"] and words[2].isdigit():
            return str(int(words[2]) // 1000)
    return None


def _each(option: str, folders: Iterable[Path]) -> list[str]:
    return [word for part in folders for word in (option, str(part))]


def _run(words: list[str]) -> None:
    try:
        result = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise BuildError(f"{words[0]}: {exc}") from exc
    if result.returncode != 0:
        raise BuildError(f"{' '.join(words)}\n{(result.stdout + result.stderr).strip()}")
