"""Triton that imports but compiles nothing, as without a C compiler: found out once, in the background."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import Pair, pretend_a_gpu

from sfast_ext import Config, accelerator, environment
from sfast_ext.kernels.backend import health, precompile, trial, triton_runtime
from sfast_ext.plans import graph_pool
from sfast_ext.runtime import plan_maker
from sfast_ext.tools import doctor

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
refusal, run = trial.unsupported, trial.run


def no_compiler() -> RuntimeError:
    """As Triton raises it."""
    return RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")


class Trial:
    """Stands in for the kernel that is compiled and launched: what it does, and the threads that it ran in."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()
        self.raises: list[Exception] = []

    def __call__(self, device: torch.device) -> None:
        assert device == GPU
        self.threads.append(threading.current_thread())
        self.begun.set()
        assert self.may_end.wait(60)
        if self.raises:
            raise self.raises[0] if len(self.raises) == 1 else self.raises.pop(0)


@pytest.fixture(autouse=True)
def poisoned():
    """Not here: a replaced torch.empty keeps plans from being made."""


@pytest.fixture
def stand_in(monkeypatch):
    """Triton on a GPU, with nothing tried yet."""
    stand_in = Trial()
    monkeypatch.setattr(trial, "run", stand_in)
    monkeypatch.setattr(trial, "unsupported", refusal)
    monkeypatch.setattr(trial, "_trials", {})
    monkeypatch.setattr(triton_runtime, "AVAILABLE", True)
    monkeypatch.setattr(triton_runtime, "INTERPRETED", False)
    monkeypatch.setattr(triton_runtime, "VERSION", (3, 6))
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (8, 6) if device.type == "cuda" else (0, 0))
    monkeypatch.setattr(environment, "has_triton", lambda: True)
    environment.unserved.cache_clear()
    for name, stands_in in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (8, 6),
        "is_current_stream_capturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stands_in)
    yield stand_in
    stand_in.may_end.set()
    for thread in stand_in.threads:
        if thread is not threading.current_thread():
            thread.join(60)
    environment.unserved.cache_clear()


def test_it_is_tried_once_whoever_asks(stand_in):
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(refusal, [GPU] * 16)) == [None] * 16
    assert refusal(torch.device("cuda")) is None and environment.triton_runs_on(GPU)
    assert len(stand_in.threads) == 1 and stand_in.threads[0] is not threading.current_thread()


def test_where_it_fails_there_is_no_triton_from_then_on(stand_in):
    stand_in.raises = [no_compiler()]
    assert trial.tried(GPU) is None and environment.left_out(GPU) == []
    assert not environment.triton_runs_on(GPU) and not environment.triton_runs_on(GPU)
    assert len(stand_in.threads) == 1
    assert trial.tried(GPU) == refusal(GPU) and environment.left_out(GPU) == [f"{refusal(GPU)}."]
    assert environment.known_bad()[-1] == f"{refusal(GPU)}."


COMMAND = ["/usr/bin/gcc", "/tmp/tmpab/main.c", "-O3", "-shared", "-fPIC", "-o", "/tmp/tmpab/cuda_utils.so"]


@pytest.mark.parametrize(
    ("exc", "header", "words"),
    [
        (no_compiler(), True, ["Failed to find C compiler", "python3-dev"]),
        (subprocess.CalledProcessError(1, COMMAND), False, ["gcc ended with status 1, there is no ", "python3-dev"]),
        (subprocess.CalledProcessError(1, COMMAND), True, ["gcc ended with status 1; ", "python3-dev"]),
        (subprocess.CalledProcessError(2, "cc main.c"), True, ["status 2"]),
        (OSError("no space left on device"), True, ["OSError: no space left on device"]),
        (ValueError(), True, ["ValueError"]),
    ],
    ids=lambda given: getattr(type(given), "__name__", given) if isinstance(given, Exception) else None,
)
def test_the_reason_is_a_sentence(stand_in, monkeypatch, tmp_path, exc, header, words):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    if header:
        (tmp_path / "Python.h").touch()
    stand_in.raises = [exc]
    reason = refusal(GPU)
    assert reason.startswith("Triton compiles nothing here: ") and all(word in reason for word in words)
    assert "\n" not in reason and len(reason) < 300 and reason.isascii()
    assert ("python3-dev" in reason) == (not isinstance(exc, (OSError, ValueError)))
    assert (str(tmp_path / "Python.h") in reason) == (not header)


@pytest.mark.parametrize(
    "exc",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: operation not permitted when stream is capturing"),
    ],
    ids=str,
)
def test_what_triton_is_not_to_blame_for_is_left_to_its_kernels(stand_in, exc):
    stand_in.raises = [exc]
    assert refusal(GPU) is None


def test_it_is_tried_again_if_python_gave_up_parsing(stand_in):
    disturbance = RuntimeError("at 1:1")
    disturbance.__cause__ = SystemError("AST constructor recursion depth mismatch")
    stand_in.raises = [disturbance, no_compiler()]
    assert "C compiler" in refusal(GPU) and len(stand_in.threads) == 2


def test_who_asks_before_it_is_over_waits(stand_in):
    stand_in.may_end.clear()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(refusal, GPU)
        assert stand_in.begun.wait(60) and trial.tried(GPU) is None and not asked.done()
        stand_in.raises = [no_compiler()]
        stand_in.may_end.set()
        assert "C compiler" in asked.result(60)


def test_nobody_waits_for_ever(stand_in, monkeypatch):
    monkeypatch.setattr(trial, "PATIENCE_S", 0.05)
    stand_in.may_end.clear()
    assert "after 0.05 seconds" in refusal(GPU) and "after 0.05 seconds" in trial.tried(GPU)
    stand_in.may_end.set()
    stand_in.threads[0].join(60)
    assert refusal(GPU) is None


def test_it_waits_for_the_end_of_a_capture(stand_in):
    with ThreadPoolExecutor(1) as pool:
        with trial.paused():
            asked = pool.submit(refusal, GPU)
            assert not stand_in.begun.wait(0.2)
        assert asked.result(60) is None and stand_in.begun.is_set()


def test_nothing_is_tried_by_a_thread_that_captures(stand_in, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert refusal(GPU) is None and not stand_in.threads


@pytest.mark.parametrize("without", ["a GPU", "Triton", "a compiler, in the interpreter"])
def test_nothing_is_tried_without(stand_in, monkeypatch, without):
    if without == "a GPU":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elif without == "Triton":
        monkeypatch.setattr(triton_runtime, "AVAILABLE", False)
    else:
        monkeypatch.setattr(triton_runtime, "INTERPRETED", True)
    assert refusal(GPU) is None and refusal(CPU) is None and trial.tried(CPU) is None
    assert not stand_in.threads


def test_nothing_is_tried_on_a_card_that_triton_does_not_know(stand_in, monkeypatch):
    monkeypatch.setattr(triton_runtime, "VERSION", (3, 1))
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (12, 0))
    assert not environment.triton_runs_on(GPU) and not stand_in.threads


@pytest.fixture
def ready(monkeypatch):
    precompile.get_ready.cache_clear()
    yield
    precompile.get_ready.cache_clear()


@pytest.mark.parametrize("triton", [True, False])
def test_it_is_tried_in_the_background_as_soon_as_a_module_is_accelerated(stand_in, ready, triton):
    stand_in.may_end.clear()
    pair = Pair(config=Config(allow_cpu=True, triton=triton))
    assert stand_in.begun.wait(60 if triton else 0.2) == triton
    stand_in.may_end.set()
    pair.release()
    if triton:
        precompile.get_ready(environment.triton_runs_on).join(60)


@pytest.fixture
def pair(stand_in, monkeypatch):
    """A model on a pretended GPU, and whether Triton was allowed for each plan."""
    pool = pretend_a_gpu(monkeypatch)
    monkeypatch.setattr(trial, "unsupported", refusal)
    monkeypatch.setattr(accelerator, "get_ready", lambda runs_on: None)  # the first plan has it tried
    monkeypatch.setattr(plan_maker, "precompile", lambda graph, device: 0)
    allowed: list[bool] = []
    passes = plan_maker.run_passes

    def run_passes(graph_module: Any, context: Any) -> Any:
        allowed.append(context.triton)
        return passes(graph_module, context)

    monkeypatch.setattr(plan_maker, "run_passes", run_passes)
    health.clear()
    with torch.no_grad():
        made = Pair("unet", Config(drop_slower=False))
        made.allowed, made.pool = allowed, pool
        yield made
        made.release()
    health.clear()


def said(pair):
    return [event["message"] for event in pair.acc.report.as_dict()["events"] if event["stage"] == "kernels"]


def test_plans_are_made_without_triton_if_nothing_compiles(stand_in, pair):
    stand_in.raises = [no_compiler()]
    pair.same(2)
    pair.same(2, batch=3)
    assert pair.allowed == [False, False] and pair.counter("captures") == 2 and pair.runs == 2, pair.words()
    assert len(stand_in.threads) == 1 and not pair.acc.status()["kernels_disabled"]
    (sentence,) = [sentence for sentence in said(pair) if "Triton" in sentence]
    assert "C compiler" in sentence and sentence.endswith(".")


def test_plans_are_made_with_triton_if_it_compiles(stand_in, pair):
    pair.same(2)
    assert pair.allowed == [True] and pair.runs == 1, pair.words()
    assert not [sentence for sentence in said(pair) if "Triton" in sentence]


def test_a_plan_waits_for_a_trial_that_is_not_over(stand_in, pair):
    stand_in.may_end.clear()
    stand_in.raises = [no_compiler()]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (stand_in.begun.wait(60), time.sleep(0.3), stand_in.may_end.set()))
        pair.same(2)
    assert pair.allowed == [False] and pair.runs == 1, pair.words()


def test_no_trial_runs_while_a_graph_is_captured(stand_in, pair, monkeypatch):
    held, honest = [], graph_pool.GraphPool._capture

    def capture(pool, *given):
        held.append(trial._quiet.locked())
        return honest(pool, *given)

    monkeypatch.setattr(graph_pool.GraphPool, "_capture", capture)
    pair.same(2)
    assert held == [True] and not trial._quiet.locked()


def test_the_doctor_tries_it_and_says_why(stand_in, monkeypatch):
    stand_in.raises = [no_compiler()]
    properties = type("Properties", (), {"name": "a card", "major": 8, "minor": 6, "total_memory": 1 << 34})
    properties.multi_processor_count = 28
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)  # it would ask a real GPU
    monkeypatch.setattr(doctor.environment, "nvrtc_version", lambda: None)
    found = doctor.collect()
    assert len(stand_in.threads) == 1
    assert any("C compiler" in sentence and "python3-dev" in sentence for sentence in found["known_bad"])
    assert any(sentence.startswith("Fused kernels: none") for sentence in found["used"])


def test_a_kernel_that_writes_something_else_is_a_failure(stand_in, monkeypatch):
    """The real trial, on the CPU: what it launches is stood in for."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(trial, "launch_kernel", lambda kernel, grid, out, value: out.fill_(value))
    run(CPU)
    monkeypatch.setattr(trial, "launch_kernel", lambda kernel, grid, out, value: None)
    with pytest.raises(RuntimeError, match="something else"):
        run(CPU)


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch):
    pytest.importorskip("triton")
    device = torch.device("cuda", torch.cuda.current_device())
    monkeypatch.setattr(trial, "_trials", {})
    assert refusal(device) is None
    run(device)


@pytest.mark.gpu
def test_on_a_gpu_without_a_c_compiler(tmp_path):
    """In a process of its own: what starts kernels is made once."""
    pytest.importorskip("triton")
    code = "from sfast_ext import environment; import torch; d = torch.device('cuda', 0); "
    code += "print(environment.triton_runs_on(d)); print(environment.left_out(d))"

    given = {**os.environ, "PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path)}
    given.pop("CC", None)
    # with which Triton 2.1 looks for the driver before it needs the compiler
    ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if ldconfig is not None:
        (tmp_path / "ldconfig").symlink_to(ldconfig)
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=Path(__file__).parents[3], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False") and "C compiler" in done.stdout
