"""A plugin of pytest: some cases of each test, and which kernels in CUDA C++ were launched how often."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from typing import Any

import pytest

from sfast_ext.kernels.backend import nvrtc

CASES = "SFAST_SANITIZER_CASES"
LAUNCHED = "kernels launched: "
_launched: Counter[str] = Counter()


def some(items: list[Any], count: int) -> list[Any]:
    """At most `count` cases of each test, from the whole range of its cases."""
    of_test = defaultdict(list)
    for item in items:
        of_test[item.nodeid.partition("[")[0]].append(item)
    kept = {id(c[i * len(c) // count]) for c in of_test.values() for i in range(count)}
    return [item for item in items if id(item) in kept]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    count = int(os.environ.get(CASES, 0))
    if count:
        kept = some(items, count)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_sessionstart() -> None:
    launch = nvrtc.Source._launch

    def counted(source: nvrtc.Source, grid: tuple[int, ...], *args: Any, **constants: int) -> None:
        launch(source, grid, *args, **constants)
        _launched[source.name] += 1

    nvrtc.Source._launch = counted  # type: ignore[method-assign,assignment]


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(LAUNCHED + ", ".join(f"{name} {count}" for name, count in sorted(_launched.items())))
