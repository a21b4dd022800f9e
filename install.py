"""Run by the WebUI at each launch, in a process of its own: says what is missing, installs and changes nothing.

The extension needs only what a WebUI has. torch is not imported here, which would cost seconds at every launch.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys

PYTHON = (3, 10)
TORCH = (2, 1)


def installed(*packages: str) -> str | None:
    """The version of the first of these packages that is installed, or None."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def remarks() -> list[str]:
    """What keeps the extension from its full speed here, a sentence each; empty where nothing does."""
    found = []
    if sys.version_info < PYTHON:
        found.append(f"it needs Python {PYTHON[0]}.{PYTHON[1]} or later; this is {sys.version.split()[0]}")
    torch = installed("torch")
    numbers = re.match(r"(\d+)\.(\d+)", torch or "")
    if numbers and tuple(map(int, numbers.groups())) < TORCH:
        found.append(f"it needs torch {TORCH[0]}.{TORCH[1]} or later; this is {torch}")
    # on the CPU there is nothing that Triton could do; builds for it say so in their version
    if torch and "+cpu" not in torch and sys.platform != "darwin" and installed("triton", "triton-windows") is None:
        package = "triton-windows" if sys.platform == "win32" else "triton"
        found.append(
            f"Triton is not installed, so its fused kernels are off; '{sys.executable} -m pip install {package}', "
            "in the version made for your torch, turns them on"
        )
    return found


if __name__ == "__main__":
    try:
        for remark in remarks():
            print(f"Stable Fast: {remark}")
    except Exception as exc:
        print(f"Stable Fast: install.py could not look around ({exc}); the extension is loaded all the same")
