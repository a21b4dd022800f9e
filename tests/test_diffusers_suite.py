"""What `python -m diffusers_suite` counts, and that it notices a test which fails only with accelerated models."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from diffusers_suite import __main__ as suite
from diffusers_suite import plugin

from sfast_ext import passes

MODEL = '''
import torch
from diffusers import UNet2DConditionModel

BLOCKS = dict(block_out_channels=(8, 16), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
              up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=8, attention_head_dim=2)


def results():
    model = UNet2DConditionModel(layers_per_block=1, norm_num_groups=2, sample_size=8, **BLOCKS).eval()
    with torch.no_grad():
        return model, [model(torch.ones(1, 4, 8, 8), 3, torch.ones(1, 5, 8))[0] for _ in range(3)]


def test_same_result():
    _, (first, *others) = results()
    assert all(torch.allclose(first, other, atol=1e-4) for other in others)


def test_nobody_is_in_the_forward():
    model, _ = results()
    assert "forward" not in vars(model)


def test_fails_both_ways():
    raise AssertionError
'''


def run(**outcomes: str) -> suite.Run:
    """A run with these outcomes."""
    return suite.Run({name: [outcome, "message"] for name, outcome in outcomes.items()}, {"captures": 2}, {}, [])


def test_only_what_passes_without_acceleration_can_be_a_regression():
    without = run(a="passed", b="failed", c="skipped", d="passed", e="passed")
    accelerated = run(a="passed", b="failed", c="failed", d="failed")
    assert suite.regressions(without, accelerated) == ["d", "e"]


def test_the_numbers_of_tests_that_fail_both_ways_are_compared():
    messages = {
        "rounded": ("Max diff: 2.296144e-02, Actual: 0.2453386", "Max diff: 2.296117e-02, Actual: 0.2453388"),
        "other": ("assert -0.12 == 0.2", "assert 0.12 == 0.2"),
        "more": ("no network", "error 0.5"),
        "passes": ("", "assert 1.5 < 1.0"),
    }
    outcomes = [
        {name: ["passed" if not texts[way] else "failed", texts[way]] for name, texts in messages.items()}
        for way in (0, 1)
    ]
    without, accelerated = (suite.Run(each, {}, {}, []) for each in outcomes)
    assert suite.fail_otherwise(without, accelerated) == ["other", "more"]


def test_the_table_has_a_row_for_each_file_and_their_sums():
    without, accelerated = run(a="passed", b="failed", c="skipped"), run(a="failed", b="failed", c="skipped")
    rows = suite.table([suite.Compared(f"tests/{name}.py", without, accelerated, [], ["a"]) for name in "xy"])
    assert rows.splitlines()[2:] == [
        "| `x.py` | 2 | 1 | 0 | 0 | 1 | 2 | 0 |",
        "| `y.py` | 2 | 1 | 0 | 0 | 1 | 2 | 0 |",
        "| all | 4 | 2 | 0 | 0 | 2 | 4 | 0 |",
    ]


def forked(command: list[str], cwd: Path, env: dict[str, str], **options: Any) -> SimpleNamespace:
    """As `subprocess.run`, in a copy of this process, which need not import torch and diffusers again."""
    child = os.fork()
    if not child:
        try:
            os.environ.update(env)
            os.chdir(cwd)
            sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
            pytest.main([*command[command.index("pytest") + 1 :], "-p", "no:faulthandler"])
        finally:
            os._exit(0)
    return SimpleNamespace(returncode=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), stdout="", stderr="")


def test_a_run_that_ends_without_outcomes_is_an_error(tmp_path: Path):
    with pytest.raises(RuntimeError, match="pytest ended with"):
        suite.run(tmp_path, ["--no-such-option"], suite.STOCK)


def test_unchanged_graphs_are_those_without_passes(monkeypatch: pytest.MonkeyPatch):
    accelerated = []
    monkeypatch.setattr(passes, "PASSES", list(passes.PASSES))
    monkeypatch.setattr(plugin, "accelerate_all", lambda: accelerated.append(len(passes.PASSES)))
    for way, left in ((suite.STOCK, None), (suite.ACCELERATED, len(passes.PASSES)), (suite.UNCHANGED, 0)):
        accelerated.clear()
        monkeypatch.setenv("SFAST_SUITE_ACCELERATE", way)
        plugin.pytest_configure(None)
        assert accelerated == ([] if left is None else [left])


def test_a_test_that_fails_only_with_accelerated_models_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_in_a_process, done = suite.run, dict[str, suite.Run]()

    def once_each_way(checkout: Path, tests: list[str], way: str) -> suite.Run:
        # a second run of the same would have the same outcomes, and one without passes those of one with them
        if way not in done:
            done[way] = done[suite.ACCELERATED] if way == suite.UNCHANGED else run_in_a_process(checkout, tests, way)
        return done[way]

    monkeypatch.setattr(suite, "run", once_each_way)
    if hasattr(os, "fork"):
        monkeypatch.setattr(suite.subprocess, "run", forked)
    file = tmp_path / "tests" / "test_model.py"
    file.parent.mkdir()
    file.write_text(MODEL, encoding="utf-8")
    found = suite.compare(tmp_path, "tests/test_model.py")
    assert found.regressions == ["tests/test_model.py::test_nobody_is_in_the_forward"]
    assert (found.without.passed(), found.accelerated.passed()) == (2, 1)
    # each of the three calls of the two models, the first one included
    assert found.accelerated.counters["eager_runs"] == 6 and not found.without.counters
    assert set(done) == {suite.STOCK, suite.ACCELERATED, suite.UNCHANGED}
