"""`python -m sanitizer`: each tool over each file of tests/kernels, a line for each, exit status 1 with a finding.

Only this project's kernels are instrumented. Tests of tensors beyond 32 bits need most of a GPU's memory and run alone,
with `--large`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from sanitizer.few import CASES, LAUNCHED
from sfast_ext import kernels

ROOT = Path(__file__).resolve().parents[2]
MEMCHECK = "memcheck"
INITCHECK = "initcheck"
TOOLS = (MEMCHECK, "racecheck", "synccheck")
MORE_TOOLS = (INITCHECK,)
"""Only if named: it watches all kernels, PyTorch's too."""
LARGE = "(31_bits or 32_bits)"
# a capture cannot allocate if torch keeps no memory
CAPTURES = "in_a_cuda_graph"
FIRST_LINES = 12
"""Of what a run wrote, printed if no test ran."""
PLACES = ("/usr/local/cuda/bin",)
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed)")
_LAUNCHED = re.compile(f"^{LAUNCHED}(.*)", re.MULTILINE)
_PASSED, _FAILED = re.compile(r"(\d+) passed"), re.compile(r"(\d+) (?:failed|error)")


class Outcome(NamedTuple):
    """Of one tool over one file. `findings` is None if the sanitizer wrote no summary: it was cut or crashed.
    `launched` has the kernels in CUDA C++, with how often each was launched."""

    findings: int | None
    untracked: int
    passed: int
    failed: int
    launched: str = ""

    @property
    def clean(self) -> bool:
        """Whether all was watched, and nothing found."""
        return self.findings == 0 and not self.untracked and not self.failed and self.passed > 0


def names() -> list[str]:
    """The functions of all kernels, in Triton and in CUDA C++."""
    found = {"copies"}
    for kernel in kernels.registered().values():
        found |= {getattr(each, "fn", each).__name__ for each in kernel.triton_functions}
        found |= {source.name for source in kernel.cuda_sources}
    return sorted(found)


def outcome(log: str, said: str) -> Outcome:
    """What a log of compute-sanitizer and pytest's output tell."""
    summary = _SUMMARY.search(log)
    tail = said.strip().rpartition("\n")[2]
    passed, failed, launched = _PASSED.search(tail), _FAILED.search(tail), _LAUNCHED.search(said)
    return Outcome(
        int(summary[1] or summary[2]) if summary else None,
        log.count("Internal Sanitizer Error"),
        int(passed[1]) if passed else 0,
        int(failed[1]) if failed else 0,
        launched[1] if launched else "",
    )


def files(only: str = "") -> list[str]:
    """The files with tests of kernels on a GPU, by their paths in tests/kernels, that have one of some words in
    their path."""
    folder = ROOT / "tests" / "kernels"
    found = sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/test_*.py"))
    words = only.split() or [""]
    return [file for file in found if any(word in file for word in words) and not file.startswith("backend/")]


def command(tool: str, file: str, large: bool, log: Path, binary: str, only: str = "") -> list[str]:
    """One tool over one file. only: which tests, as of pytest's `-k`."""
    # initcheck has to see who wrote what they read
    watched = [] if tool == INITCHECK else ["--kernel-name", f"regex={'|'.join(names())}"]
    chosen = LARGE if large else f"not {LARGE}"
    chosen += f" and not {CAPTURES}" if tool in (MEMCHECK, INITCHECK) else ""
    tests = [f"tests/kernels/{file}", "-p", "sanitizer.few", "-k", f"{chosen} and ({only})" if only else chosen]
    # for the stack of the host it takes references to frames of Python, and never drops them: tensors stay allocated
    options = ["--tool", tool, "--show-backtrace", "device", *watched, "--log-file", str(log)]
    return [binary, *options, sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *tests]


def environment(tool: str, cases: int = 0) -> dict[str, str]:
    """For memcheck each tensor is an allocation of the driver's: an access that runs into the next tensor is seen. For
    initcheck too: memory that another tensor had is not written yet."""
    given = {CASES: str(cases)} | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool in (MEMCHECK, INITCHECK) else {})
    return os.environ | given


def run(tool: str, file: str, given: argparse.Namespace, binary: str) -> bool:
    """Print one line, but none for a file without such tests; whether nothing was found."""
    log, began = given.logs / f"{tool}-{Path(file).stem}{'-large' if given.large else ''}.txt", time.monotonic()
    try:
        done = subprocess.run(
            command(tool, file, given.large, log, binary, given.tests),
            cwd=ROOT,
            env=environment(tool, given.cases),
            capture_output=True,
            text=True,
            timeout=given.limit,
        )
        said, erred, status = done.stdout, done.stderr, str(done.returncode)
    except subprocess.TimeoutExpired as late:
        said, erred, status = (late.stdout or b"").decode(), (late.stderr or b"").decode(), "cut"
    log.with_suffix(".pytest.txt").write_text(said + erred, encoding="utf-8")
    told = outcome(log.read_text(encoding="utf-8", errors="replace") if log.exists() else "", said)
    # pytest selected nothing; the sanitizer saw no call to the GPU
    if status == "5" or (status == "255" and not told.passed + told.failed and "deselected" in said):
        return True
    tests = f"{told.passed} passed, {told.failed} failed"
    found = f"findings {told.findings}, launches unwatched {told.untracked}"
    took = f"exit {status}, {time.monotonic() - began:.0f} s"
    print(f"{tool:10} {Path(file).stem:32} {tests}, {found}, {took}, of {told.launched or 'no CUDA C++'}", flush=True)
    if not told.passed + told.failed:
        print("\n".join((said + erred).splitlines()[:FIRST_LINES]), flush=True)
    return told.clean


def main(given_arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m sanitizer", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tool", choices=TOOLS + MORE_TOOLS, action="append", help=f"default: {', '.join(TOOLS)}")
    parser.add_argument("--only", default="", help="of the files, those with one of these words in their path")
    parser.add_argument("--tests", default="", help="of the tests, those that pytest's -k selects by this")
    parser.add_argument("--cases", type=int, default=0, help="of each test, at most so many cases; default: all")
    parser.add_argument("--large", action="store_true", help=f"the tests {LARGE}, and no others")
    parser.add_argument("--parallel", type=int, default=1, help="runs at once; each takes about 4 GB of the GPU")
    parser.add_argument("--limit", type=float, default=1800, help="seconds of a run")
    parser.add_argument("--logs", type=Path, default=Path("sanitizer-logs"))
    given = parser.parse_args(given_arguments)
    binary = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))
    if binary is None:
        print("compute-sanitizer was not found: it comes with the CUDA toolkit; put its folder into PATH")
        return 2
    given.logs = given.logs.resolve()
    given.logs.mkdir(parents=True, exist_ok=True)
    runs = [(tool, file) for tool in given.tool or TOOLS for file in files(given.only)]
    with ThreadPoolExecutor(given.parallel) as pool:
        clean = list(pool.map(lambda each: run(each[0], each[1], given, binary), runs))
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
