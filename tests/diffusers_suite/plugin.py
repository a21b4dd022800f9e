"""A plugin for pytest that accelerates each UNet, VAE and ControlNet of diffusers when it is constructed.

Load it with `-p diffusers_suite.plugin`. Environment variables:
    SFAST_SUITE_ACCELERATE: "1" to accelerate, "unchanged" to accelerate with graphs as they were recorded, without
        passes; otherwise the outcomes are only recorded.
    SFAST_SUITE_OUTCOMES: the JSON file that receives the outcome of each test.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

_outcomes: dict[str, tuple[str, str]] = {}
"""Outcome and the end of the message for each test."""
_reports: list[Any] = []


def pytest_configure(config: pytest.Config) -> None:
    """Wraps the constructors before any test module is imported."""
    way = os.environ.get("SFAST_SUITE_ACCELERATE")
    if way == "unchanged":
        from sfast_ext import passes

        passes.PASSES.clear()
    if way in ("1", "unchanged"):
        accelerate_all()


def accelerate_all() -> None:
    """Accelerate each model of these classes from now on."""
    from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel

    for kind in (UNet2DConditionModel, ControlNetModel):
        _accelerate_at_construction(kind, ())
    _accelerate_at_construction(AutoencoderKL, ("encoder", "decoder"))
    _use_plans_at_once()


def _accelerate_at_construction(kind: type, parts: tuple[str, ...]) -> None:
    from sfast_ext import Config, accelerate

    # each plan is kept whatever it measures: a test calls a tiny model once or twice
    config = Config(allow_cpu=True, drop_slower=False)
    construct = kind.__init__  # type: ignore[misc]

    @functools.wraps(construct)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        if type(self) is kind:
            for module in [getattr(self, part) for part in parts] or [self]:
                accelerator = accelerate(module, config)
                # a test changes the same model several times
                accelerator._backoff.max_unused = 1000
                _reports.append(accelerator.report)

    kind.__init__ = constructed  # type: ignore[misc]


def _use_plans_at_once() -> None:
    """Serve a call for which a plan was made once more, by the plan: most tests call a model once, and the result of
    that call is the original forward's."""
    from sfast_ext.capture.arguments import with_own_containers
    from sfast_ext.runtime.call_server import CallServer

    serve = CallServer.serve

    def served(self: CallServer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known, again = set(self._cache.plans), with_own_containers(args, kwargs)
        result = serve(self, args, kwargs)
        return serve(self, *again) if self._cache.plans.keys() - known else result

    CallServer.serve = served  # type: ignore[method-assign]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keeps the worst outcome of set-up, call and tear-down."""
    if report.when == "call" or report.outcome != "passed":
        known = _outcomes.get(report.nodeid)
        if known is None or known[0] == "passed":
            _outcomes[report.nodeid] = (_outcome(report), str(report.longrepr or "")[-600:])


def _outcome(report: pytest.TestReport) -> str:
    expected_to_fail = hasattr(report, "wasxfail")
    return f"x{report.outcome}" if expected_to_fail else report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the outcomes, and what the accelerators did."""
    file = os.environ.get("SFAST_SUITE_OUTCOMES")
    if not file:
        return
    counters: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    errors = []
    for report in _reports:
        status = report.as_dict()
        counters.update(status["counters"])
        reasons.update(status["reasons_since_start"])
        if status["last_error"]:
            errors.append(status["last_error"])
    found = {"outcomes": _outcomes, "counters": counters, "reasons": reasons, "errors": errors}
    Path(file).write_text(json.dumps(found, indent=1), encoding="utf-8")
