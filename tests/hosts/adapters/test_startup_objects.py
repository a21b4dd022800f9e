"""Runs `startup_objects_alone.py` in a process of its own: each of its tests walks through all objects that there are
several times, which are millions in the process of a whole suite."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("accelerate")
ALONE = Path(__file__).with_name("startup_objects_alone.py")


def test_in_a_process_of_their_own() -> None:
    # a process of xdist's would be taken for one of its workers
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-v", str(ALONE)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], env=own)
    assert run.returncode == 0, run.stdout + run.stderr
    tests = [each.name for each in ast.parse(ALONE.read_text("utf-8")).body if each.__class__ is ast.FunctionDef]
    for name in (name for name in tests if name.startswith("test_")):
        assert f"{ALONE.name}::{name}" in run.stdout, run.stdout
