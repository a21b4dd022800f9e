"""Takes each condition away in a copy of the tree, and runs the tests that are to notice: `python -m mutations`."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mutations import ROOT, Mutation, every

NOTICED, SURVIVED, BROKEN = "noticed", "SURVIVED", "BROKEN"
LIMIT_S = 180
"""For the tests of one mutation: one that makes a thread wait for ever is noticed as well."""
_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line")
_BEFOREHAND = ("torch", "torch._dynamo", "torch.fx.experimental.proxy_tensor", "diffusers", "pytest")
_COPIED = ("sfast_ext", "tests", "benchmarks", "csrc", "scripts", "pyproject.toml", "install.py", "README.md")


def copy(to: Path) -> None:
    """What the tests need of the tree."""
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / name)


def _run(root: Path, tests: Sequence[str], said: Path) -> None:
    """In a process of its own, which ends with pytest's exit status."""
    os.chdir(root)
    # in place of the tree that this was started from
    here = {str(ROOT), str(ROOT / "tests"), ""}
    sys.path[:] = [str(root), str(root / "tests"), *(path for path in sys.path if path not in here)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "mutations"]:
        del sys.modules[name]
    import pytest

    with said.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        status = pytest.main([*_OPTIONS, *(f"tests/{test}" for test in tests)])
    # threads that a mutation left waiting are not waited for
    os._exit(status)


def tests_pass(root: Path, tests: Sequence[str], limit_s: float | None = LIMIT_S) -> tuple[int | None, str]:
    """The exit status of pytest, None if it took too long, and what it said."""
    said = root / "said.txt"
    process = multiprocessing.get_context("fork").Process(target=_run, args=(root, tests, said))
    process.start()
    process.join(limit_s)
    status = process.exitcode
    if status is None:
        process.kill()
        process.join()
    return status, said.read_text(encoding="utf-8") if said.exists() else ""


def misfits(mutations: Sequence[Mutation]) -> list[str]:
    """What is wrong with the list itself: a source that is not there once, a mutant that is no Python or changes
    nothing, a test that does not exist."""
    found = []
    for mutation in mutations:
        where = f"{mutation.file}: {mutation.what}"
        try:
            changed = ast.dump(ast.parse(mutation.mutated())) != _dumped(ROOT / "sfast_ext" / mutation.file)
        except (OSError, ValueError, SyntaxError) as exc:
            found.append(f"{where}: {exc}")
            continue
        if not changed:
            found.append(f"{where}: the mutant is the same program")
        for test in mutation.tests or ("no test",):
            file, _, name = test.partition("::")
            if name.partition("[")[0] not in _functions(ROOT / "tests" / file):
                found.append(f"{where}: there is no {test}")
    return found


@functools.lru_cache(maxsize=None)
def _dumped(file: Path) -> str:
    return ast.dump(ast.parse(file.read_text(encoding="utf-8")))


@functools.lru_cache(maxsize=None)
def _functions(file: Path) -> frozenset[str]:
    if not file.is_file():
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(f.name for f in tree.body if isinstance(f, ast.FunctionDef))


def prepare() -> None:
    """What each of the processes would import anew; nothing of the tree, which is another in each."""
    # a file of the same size and second would pass for the compiled one
    sys.dont_write_bytecode = True
    os.environ["PYTEST_ADDOPTS"] = ""
    for name in _BEFOREHAND:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)


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
    """1 if a mutation survives."""
    parser = argparse.ArgumentParser(prog="mutations", description=__doc__)
    parser.add_argument("--only", metavar="WORDS", default="", help="those with these words in what they take away")
    parser.add_argument("--list", action="store_true", help="check the list itself, run nothing")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a mutation first")
    options = parser.parse_args(given)
    chosen = [m for m in every() if options.only in f"{m.file}: {m.what}"]
    wrong = misfits(chosen)
    if wrong or options.list:
        print("\n".join([*wrong, f"{len(chosen)} mutations, {len(wrong)} misfits"]))
        return 1 if wrong else 0
    prepare()
    left: list[str] = []
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy(root)
        if not options.trust:
            tests = sorted({test for m in chosen for test in m.tests})
            status, said = tests_pass(root, tests, None)
            if status != 0:
                print(f"without a mutation some fail, too:\n{said[-3000:]}")
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
