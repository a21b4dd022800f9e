"""Run by the WebUI at each launch, in a separate process: says what is missing, installs and changes nothing.

The extension needs only what a WebUI has. torch is not imported here, which would cost seconds at every launch.
"""

from __future__ import annotations

import importlib.metadata
import io
import re
import sys

PYTHON = (3, 10)
TORCH = (2, 1)
TRITON_WINDOWS = {
    (2, 4): "3.2",
    (2, 5): "3.2",
    (2, 6): "3.3",
    (2, 7): "3.4",
    (2, 8): "3.5",
    (2, 9): "3.6",
    (2, 10): "3.7",
}
"""The first triton-windows that is too new for a torch (its README). There is none for an older torch."""


def installed(*packages: str) -> str | None:
    """The version of the first of these packages that is installed, or None."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def remarks() -> list[str]:
    """What keeps the extension from its full speed here, a sentence each; empty if nothing does."""
    found = []
    if sys.version_info < PYTHON:
        found.append(f"it needs Python {PYTHON[0]}.{PYTHON[1]} or later; this is {sys.version.split()[0]}")
    torch = installed("torch")
    numbers = re.match(r"(\d+)\.(\d+)", torch or "")
    release = tuple(map(int, numbers.groups())) if numbers else ()
    if release and release < TORCH:
        found.append(f"it needs torch {TORCH[0]}.{TORCH[1]} or later; this is {torch}")
    # on the CPU there is nothing that Triton could do; builds for it say so in their version
    if torch and "+cpu" not in torch and sys.platform != "darwin" and installed("triton", "triton-windows") is None:
        package = _triton_for(release)
        if package is not None:
            found.append(
                "Triton is not installed, so kernels in CUDA C++ run in its place, which are a little slower. "
                f'To add it: "{sys.executable}" -m pip install "{package}"'
            )
    return found


def _triton_for(release: tuple[int, ...]) -> str | None:
    """What pip is to install for a torch; None if there is nothing for it."""
    if sys.platform != "win32":
        return "triton"
    if release < min(TRITON_WINDOWS):
        return None
    limit = TRITON_WINDOWS.get(release[:2])  # type: ignore[call-overload]
    return f"triton-windows<{limit}" if limit else "triton-windows"


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.isatty():
        # the WebUIs read UTF-8 from the pipe; Windows' code page has not every character of the interpreter's path
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    try:
        for remark in remarks():
            print(f"Stable Fast: {remark}")
    except Exception as exc:
        print(f"Stable Fast: install.py could not look around ({exc}); the extension is loaded all the same")
