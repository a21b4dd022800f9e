"""What compute-sanitizer and pytest wrote is read right: nothing that was not watched counts as clean."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sanitizer import __main__ as runner
from sanitizer import few
from sanitizer.__main__ import Outcome, command, names, outcome

PASSED = "....\n4 passed, 9 deselected in 3.21s\n"
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
UNTRACKED = "========= Internal Sanitizer Error: The Sanitizer encountered an error while launching conv2d\n"


@pytest.mark.parametrize(
    ("log", "said", "expected", "clean"),
    [
        (CLEAN, PASSED, Outcome(0, 0, 4, 0), True),
        (CLEAN.replace("0 errors", "1 error"), PASSED, Outcome(1, 0, 4, 0), False),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", PASSED, Outcome(0, 0, 4, 0), True),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", PASSED, Outcome(1, 0, 4, 0), False),
        (UNTRACKED + CLEAN, PASSED, Outcome(0, 1, 4, 0), False),
        (CLEAN, "1 failed, 3 passed in 1.00s", Outcome(0, 0, 3, 1), False),
        (CLEAN, "no tests ran in 0.10s", Outcome(0, 0, 0, 0), False),
        ("========= COMPUTE-SANITIZER\n", PASSED, Outcome(None, 0, 4, 0), False),
    ],
)
def test_what_was_written_is_read(log: str, said: str, expected: Outcome, clean: bool) -> None:
    told = outcome(log, said)
    assert (told, told.clean) == (expected, clean)


def test_each_kernel_is_watched() -> None:
    found = names()
    assert {"layer_norm_kernel", "conv2d", "mma_gemm", "copies"} <= set(found)
    assert f"regex={'|'.join(found)}" in command(
        "memcheck", "conv/test_conv2d.py", False, Path("log"), "compute-sanitizer"
    )


def test_each_file_of_kernels_is_run() -> None:
    found = runner.files()
    assert {"conv/test_conv2d.py", "linear/test_mma_gemm.py"} <= set(found) and len(found) > 15
    assert runner.files("linear/test_mma_gemm") == ["linear/test_mma_gemm.py"]
    assert runner.files("swiglu wgmma_conv8") == ["eight_bits/test_wgmma_conv8.py", "pointwise/test_swiglu.py"]
    # a word of `LARGE` in the path of a file would leave out, or select, all its tests
    assert not any(word in file for file in found for word in re.findall(r"\w+_bits", runner.LARGE))
    assert re.findall(r"\w+_bits", runner.LARGE)


def test_without_the_sanitizer_it_says_where_it_comes_from(monkeypatch, capsys) -> None:
    monkeypatch.setattr(runner.shutil, "which", lambda *args, **kwargs: None)
    assert runner.main([]) == 2
    assert "CUDA toolkit" in capsys.readouterr().out


def test_why_no_test_ran_is_told(monkeypatch, tmp_path, capsys) -> None:
    wrote = ["-c", "import sys; print('collected 0'); sys.exit('No module named pytest')"]
    monkeypatch.setattr(runner, "command", lambda *given: [sys.executable, *wrote])
    given = SimpleNamespace(logs=tmp_path, large=False, tests="", cases=0, limit=60)
    assert not runner.run("memcheck", "conv/test_conv2d.py", given, "")
    assert "No module named pytest" in capsys.readouterr().out
    assert "No module named pytest" in (tmp_path / "memcheck-test_conv2d.pytest.txt").read_text(encoding="utf-8")


def test_memcheck_sees_accesses_between_tensors_and_leaves_out_captures() -> None:
    commands = {tool: command(tool, "conv/test_conv2d.py", False, Path("log"), "")[-1] for tool in runner.TOOLS}
    assert {tool for tool, chosen in commands.items() if "in_a_cuda_graph" in chosen} == {"memcheck"}
    variable, tools = "PYTORCH_NO_CUDA_MEMORY_CACHING", runner.TOOLS + runner.MORE_TOOLS
    assert {tool for tool in tools if runner.environment(tool).get(variable) == "1"} == {"memcheck", "initcheck"}


def test_some_tests_and_some_of_their_cases() -> None:
    given = command("racecheck", "conv/test_conv2d.py", False, Path("log"), "", "views or zeros")
    assert given[-1].endswith("and (views or zeros)") and given[given.index("sanitizer.few") - 1] == "-p"
    items = [SimpleNamespace(nodeid=f"test_a.py::{name}") for name in ("one", *(f"two[{i}]" for i in range(10)))]
    assert [item.nodeid[11:] for item in few.some(items, 2)] == ["one", "two[0]", "two[5]"]
    assert few.some(items, 20) == items


def test_what_was_launched_is_told() -> None:
    assert outcome(CLEAN, f"..\n{few.LAUNCHED}conv2d 3, mma_gemm 1\n{PASSED}").launched == "conv2d 3, mma_gemm 1"


def test_initcheck_watches_who_writes() -> None:
    assert "--kernel-name" not in command("initcheck", "conv/test_conv2d.py", False, Path("log"), "")


def test_no_stack_of_the_host_is_asked_for() -> None:
    given = command("memcheck", "conv/test_conv2d.py", False, Path("log"), "")
    assert given[given.index("--show-backtrace") + 1] == "device"
