"""Runs diffusers' own tests with and without accelerated models, and compares: `python -m diffusers_suite CHECKOUT`.

The checkout is one of huggingface/diffusers with its tests; its own library is used, not an installed one. Nothing is
written into it. Each file runs in two processes, one after the other. A test that passes without acceleration and does
not pass with it is run again both ways. If it fails in the second run as well, it is run with graphs as they were
recorded, without passes. What passes then is reported as rounding: such a test compares a result of the original
forward with one of a plan more closely than float32 rounds. What fails then as well is a regression, and the exit
status is 1. Models that tests load from a hub need a network or a cache: without them those tests fail both ways. If a
test fails both ways, the numbers in its messages are compared: those that differ are listed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
STOCK, ACCELERATED, UNCHANGED = "0", "1", "unchanged"
FILES = (
    "tests/models/unets/test_models_unet_2d_condition.py",
    "tests/models/autoencoders/test_models_autoencoder_kl.py",
    "tests/pipelines/stable_diffusion/test_stable_diffusion*.py",
    "tests/pipelines/stable_diffusion_2/test_stable_diffusion*.py",
    "tests/pipelines/stable_diffusion_xl/test_stable_diffusion_xl*.py",
    "tests/pipelines/stable_diffusion_adapter/test_*.py",
    "tests/pipelines/controlnet/test_controlnet*.py",
    "tests/pipelines/ip_adapters/test_ip_adapter_stable_diffusion.py",
    "tests/pipelines/pag/test_pag_sd.py",
    "tests/pipelines/pag/test_pag_sd_*.py",
    "tests/pipelines/pag/test_pag_sdxl*.py",
    "tests/pipelines/pag/test_pag_controlnet_sd*.py",
    "tests/pipelines/latent_consistency_models/test_*.py",
    "tests/lora/test_lora_layers_sd.py",
    "tests/lora/test_lora_layers_sdxl.py",
)
"""Patterns of test files, relative to the checkout."""
LIMIT_S = 3600
"""For one file, one way."""


class Run(NamedTuple):
    """What the tests of a file did in one process: outcome and message of each, counters and reasons of the models."""

    outcomes: dict[str, list[str]]
    counters: dict[str, int]
    reasons: dict[str, int]
    errors: list[dict[str, Any]]

    def passed(self) -> int:
        """The number of tests that passed."""
        return sum(outcome == "passed" for outcome, _ in self.outcomes.values())


class Compared(NamedTuple):
    """A file run both ways, and the tests that fail with acceleration alone: only with passes, and also without."""

    file: str
    without: Run
    accelerated: Run
    rounding: list[str]
    regressions: list[str]


def files_of(checkout: Path, patterns: Sequence[str] = FILES) -> list[str]:
    """The test files of a checkout, relative to it."""
    return sorted({str(path.relative_to(checkout)) for pattern in patterns for path in checkout.glob(pattern)})


def run(checkout: Path, tests: Sequence[str], way: str) -> Run:
    """Run tests of a checkout in a separate process.

    Args:
        way: see `SFAST_SUITE_ACCELERATE` of the plugin.

    Raises:
        RuntimeError: pytest did not end in an orderly way.
    """
    paths = (str(ROOT), str(ROOT / "tests"), str(checkout / "src"), *filter(None, [os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "outcomes.json")
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "SFAST_SUITE_ACCELERATE": way,
            "SFAST_SUITE_OUTCOMES": str(file),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        options = ("-q", "-p", "diffusers_suite.plugin", "-p", "no:cacheprovider", "--no-header", "--tb=short")
        command = [sys.executable, "-W", "ignore", "-m", "pytest", *options, *tests]
        done = subprocess.run(command, cwd=checkout, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
        if not file.exists():
            raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return Run(**json.loads(file.read_text(encoding="utf-8")))


def regressions(without: Run, accelerated: Run) -> list[str]:
    """The tests that pass without acceleration and do not pass with it."""
    theirs = accelerated.outcomes
    return [name for name, (outcome, _) in without.outcomes.items() if outcome == "passed" != _of(theirs, name)]


def _of(outcomes: dict[str, list[str]], name: str) -> str:
    return outcomes.get(name, ["missing"])[0]


def fail_otherwise(without: Run, accelerated: Run) -> list[str]:
    """The tests that fail both ways, with other numbers in the message."""
    found = []
    for name, (outcome, message) in without.outcomes.items():
        other, others = accelerated.outcomes.get(name, ["missing", ""])
        if outcome == other == "failed" and not _same(_numbers(message), _numbers(others)):
            found.append(name)
    return found


def _numbers(message: str) -> list[float]:
    return [float(each) for each in re.findall(r"-?\b\d+\.\d+(?:e[+-]?\d+)?", message)]


def _same(numbers: Sequence[float], others: Sequence[float]) -> bool:
    near = (math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-4) for a, b in zip(numbers, others))
    return len(numbers) == len(others) and all(near)


def compare(checkout: Path, file: str) -> Compared:
    """Run a file both ways. A difference counts if it is there in a second run."""
    without, accelerated = run(checkout, [file], STOCK), run(checkout, [file], ACCELERATED)
    suspects, failed = regressions(without, accelerated), []
    if suspects:
        again = run(checkout, suspects, STOCK)
        suspects = regressions(again, run(checkout, suspects, ACCELERATED))
    if suspects:
        failed = regressions(again, run(checkout, suspects, UNCHANGED))
        # those that were not run without acceleration again are not asked for
        failed = [name for name in failed if name in suspects]
    return Compared(file, without, accelerated, [name for name in suspects if name not in failed], failed)


def table(compared: Iterable[Compared]) -> str:
    """A row in Markdown for each file, and a last one with the sums."""
    lines = [
        "| tests of diffusers | run | passed | passed accelerated | rounding | regressions | plans | runs of plans |",
        "|---|---|---|---|---|---|---|---|",
    ]
    totals: Counter[str] = Counter()
    for each in compared:
        counters = each.accelerated.counters
        figures = {
            "run": sum(outcome != "skipped" for outcome, _ in each.without.outcomes.values()),
            "passed": each.without.passed(),
            "accelerated": each.accelerated.passed(),
            "rounding": len(each.rounding),
            "regressions": len(each.regressions),
            "plans": counters.get("captures", 0),
            "runs": counters.get("eager_runs", 0) + counters.get("replays", 0),
        }
        totals.update(figures)
        lines.append(_row(f"`{each.file.removeprefix('tests/')}`", figures.values()))
    return "\n".join([*lines, _row("all", totals.values())])


def _row(name: str, figures: Iterable[object]) -> str:
    return f"| {' | '.join([name, *map(str, figures)])} |"


def main() -> int:
    """Print the table, and each test that fails only with accelerated models. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m diffusers_suite", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a checkout of huggingface/diffusers")
    parser.add_argument("--only", default="", help="run the files that have this text in their path")
    parser.add_argument("--workers", type=int, default=2, help="files that run at the same time (default: 2)")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    files = [file for file in files_of(checkout) if options.only in file]
    if not files:
        parser.error(f"{options.checkout} has none of diffusers' tests{' of that name' if options.only else ''}")
    with ThreadPoolExecutor(max(1, options.workers)) as pool:
        compared = []
        for each in pool.map(lambda file: compare(checkout, file), files):
            compared.append(each)
            print(f"{each.file}: {each.without.passed()} passed, accelerated {each.accelerated.passed()}", flush=True)
    print(f"\n{table(compared)}")
    failed = [name for each in compared for name in each.regressions]
    messages = {
        name: each.accelerated.outcomes.get(name, ["", "was not run"])[1]
        for each in compared
        for name in each.rounding + each.regressions
    }
    if options.json:
        options.json.write_text(json.dumps([each._asdict() for each in compared], indent=1), encoding="utf-8")
    for what, names in (("rounding", [r for c in compared for r in c.rounding]), ("regression", failed)):
        for name in names:
            print(f"\n{what}: {name}\n{messages[name]}")
    for each in compared:
        for name in fail_otherwise(each.without, each.accelerated):
            print(f"\nfails otherwise: {name}\n{each.accelerated.outcomes[name][1]}")
    print(f"\n{len(failed)} regressions")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
