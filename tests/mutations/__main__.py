"""Takes each condition away in a copy of the tree, and runs the tests that are to notice: `python -m mutations`."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mutations import ROOT, Mutation, every

NOTICED, SURVIVED, BROKEN = "noticed", "SURVIVED", "BROKEN"
LIMIT_S = 180
"""For the tests of one mutation: one that makes a thread wait for ever is noticed as well."""
_PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header", "--tb=line")
_COPIED = ("sfast_ext", "tests", "benchmarks", "csrc", "scripts", "pyproject.toml", "install.py", "README.md")


def copy(to: Path) -> None:
    """What the tests need of the tree."""
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / name)


def tests_pass(root: Path, tests: Sequence[str]) -> tuple[int | None, str]:
    """The exit status of pytest, None where it took too long, and what it said."""
    # a file of the same size and second would pass for the compiled one
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, *_PYTEST, *(f"tests/{test}" for test in tests)]
    try:
        done = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return None, f"they took more than {LIMIT_S} s"
    return done.returncode, done.stdout + done.stderr


def verdict(root: Path, mutation: Mutation) -> tuple[str, str]:
    """What becomes of a mutation in the copy at `root`, which is as it was afterwards; and what pytest said."""
    file = root / "sfast_ext" / mutation.file
    honest = file.read_text(encoding="utf-8")
    try:
        file.write_text(mutation.mutated(root), encoding="utf-8")
        status, said = tests_pass(root, mutation.tests)
    finally:
        file.write_text(honest, encoding="utf-8")
    # 1: tests failed; all else but 0 says that pytest did not come to run them
    return {0: SURVIVED, 1: NOTICED, None: NOTICED}.get(status, BROKEN), said


def main(given: Sequence[str] | None = None) -> int:
    """1 where a mutation survives."""
    parser = argparse.ArgumentParser(prog="mutations", description=__doc__)
    parser.add_argument("--only", metavar="WORDS", default="", help="those with these words in what they take away")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a mutation first")
    options = parser.parse_args(given)
    chosen = [m for m in every() if options.only in f"{m.file}: {m.what}"]
    left: list[str] = []
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy(root)
        if not options.trust:
            for tests in {m.tests: None for m in chosen}:
                status, said = tests_pass(root, tests)
                if status != 0:
                    print(f"without a mutation these fail: {' '.join(tests)}\n{said[-3000:]}")
                    return 1
        for mutation in chosen:
            before = time.perf_counter()
            found, said = verdict(root, mutation)
            seconds = time.perf_counter() - before
            print(f"{found:8} {seconds:5.1f} s  {mutation.file}: {mutation.what}", flush=True)
            if found != NOTICED:
                left.append(mutation.what)
            if found == BROKEN:
                print(said[-2000:], flush=True)
    print(f"{len(chosen) - len(left)} of {len(chosen)} noticed in {time.perf_counter() - started:.0f} s")
    return 1 if left or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
