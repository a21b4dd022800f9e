"""Programs that tests run, and how to install those that are missing."""

from __future__ import annotations

import os
import shutil
import sys

NODE, COMPILER = "node", "a C++ compiler"
_INSTALL = {
    # the program that installs, and what it is told for each
    "apt-get": ("sudo apt-get install", {NODE: "nodejs", COMPILER: "g++"}),
    "dnf": ("sudo dnf install", {NODE: "nodejs", COMPILER: "gcc-c++"}),
    "pacman": ("sudo pacman -S", {NODE: "nodejs", COMPILER: "gcc"}),
    "zypper": ("sudo zypper install", {NODE: "nodejs", COMPILER: "gcc-c++"}),
    "apk": ("apk add", {NODE: "nodejs", COMPILER: "g++"}),
    "brew": ("brew install", {NODE: "node", COMPILER: "gcc"}),
}


def cpp_compiler() -> str | None:
    """The path of the compiler that CXX names, or of g++ or clang++; None if there is none."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++")


def install(what: str) -> str:
    """The command that installs a program on this system."""
    if sys.platform == "darwin" and what == COMPILER:
        return "xcode-select --install"
    for program, (command, packages) in _INSTALL.items():
        if shutil.which(program):
            return f"{command} {packages[what]}"
    return f"install {packages_for(what)} with your system's packages"


def packages_for(what: str) -> str:
    """The packages that have it, by their usual names."""
    return " or ".join(dict.fromkeys(packages[what] for _, packages in _INSTALL.values()))


def without_compiler() -> str:
    """Why tests of kernels are skipped."""
    named = os.environ.get("CXX")
    said = f"CXX names {named}, which is not there" if named else f"{COMPILER} is not installed"
    return f"{said}: {install(COMPILER)}"


def missing() -> list[str]:
    """What is not here, a line each, said before the tests begin."""
    found = (
        [] if cpp_compiler() or os.name == "nt" else [f"tests of kernels in CUDA C++ are skipped: {without_compiler()}"]
    )
    if shutil.which(NODE) is None:
        found.append(f"tests of the page's JavaScript are skipped: {NODE} is not installed: {install(NODE)}")
    return found
