"""The last line of `make test`: what all its runs of pytest came to, by the files of `--junitxml`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree


class Total(NamedTuple):
    """One run, or several together."""

    passed: int
    skipped: int
    failed: int
    seconds: float

    def __str__(self) -> str:
        words = [f"{self.passed} passed", f"{self.skipped} skipped", *([f"{self.failed} failed"] * bool(self.failed))]
        minutes, seconds = divmod(round(self.seconds), 60)
        return f"{', '.join(words)} in {f'{minutes} min ' if minutes else ''}{seconds} s"


def read(file: Path) -> Total:
    """What a run came to."""
    suites = list(ElementTree.parse(file).getroot().iter("testsuite"))
    counted = {
        key: sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "skipped", "failures", "errors")
    }
    failed = counted["failures"] + counted["errors"]
    passed = counted["tests"] - counted["skipped"] - failed
    return Total(passed, counted["skipped"], failed, sum(float(suite.get("time", 0)) for suite in suites))


def line(runs: Iterable[tuple[str, Total]]) -> str:
    """The total, and each run by its name."""
    runs = list(runs)
    total = Total(*(sum(each) for each in zip(*(run for _, run in runs))))
    return f"all runs: {total} ({'; '.join(f'{name}: {run}' for name, run in runs)})"


if __name__ == "__main__":
    print(line((Path(name).stem, read(Path(name))) for name in sys.argv[1:]))
