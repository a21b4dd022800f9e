"""What `make quick` runs, and that it ends."""

from __future__ import annotations

import subprocess
import sys

import pytest
from quick import ALWAYS, ROOT, selected

CHANGES = [
    ([], []),
    (["README.md", "csrc/mma.h"], []),
    (["sfast_ext/weights/arena.py"], ["tests/weights/test_arena.py", "tests/weights"]),
    (["sfast_ext/report.py"], ["tests/test_report.py"]),
    (["sfast_ext/hosts/sdnext/probes.py"], []),
    (["tests/weights/test_gate.py"], ["tests/weights/test_gate.py"]),
    (["tests/passes/support.py"], ["tests/passes"]),
    (["benchmarks/cards/page.py", "sfast_ext/weights/gate.py"], ["tests/weights/test_gate.py", "tests/weights"]),
]


@pytest.mark.parametrize(("changed", "expected"), CHANGES)
def test_what_changed_is_tested(changed, expected):
    assert selected(changed) == [*ALWAYS, *expected]


def test_what_always_runs_is_there():
    assert all((ROOT / name).is_file() for name in ALWAYS)


def test_no_test_begins_after_its_time(tmp_path):
    file = tmp_path / "test_slow.py"
    file.write_text("import time\n\ndef test_a():\n    time.sleep(0.3)\n\ndef test_b():\n    raise AssertionError\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", str(file)]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": "", "SFAST_TEST_SECONDS": "0.2"}
    said = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
    assert "1 passed, 1 skipped" in said, said
