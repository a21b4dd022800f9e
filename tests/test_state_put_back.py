"""State while a plan is made: runs that are repeated, other threads, what no code of the forward names."""

from __future__ import annotations

import threading
import time
import types

import pytest
import torch
from stateful import GLOBAL_OBJECT, Kept, Root, built, fast, run
from torch._subclasses.fake_tensor import FakeTensor

from sfast_ext.capture import capture


def test_a_run_that_is_recorded_and_fails_is_repeated_from_where_it_began(monkeypatch):
    from sfast_ext.capture.live_trace import SUPPORTED, LiveTrace

    if not SUPPORTED:
        pytest.skip("this torch records no run on real tensors")
    def counts_where_it_is_asked_to(k, p, x):
        if x.shape[0] == 3 and type(x) is torch.Tensor and torch.overrides._len_torch_function_stack():
            k.count += 1
            raise RuntimeError("only under a mode")
        return x * (1 + k.count)

    kept = Kept()
    model = built(counts_where_it_is_asked_to, kept)
    accelerator = fast(model)
    run(model, 2)
    assert len(accelerator.plans) == 1
    recorded = []
    begin = LiveTrace._begin
    monkeypatch.setattr(LiveTrace, "_begin", lambda self, call: recorded.append(1) or begin(self, call))
    with torch.no_grad():
        result = model(torch.ones(3, 4))
    assert recorded and kept.count == 0
    torch.testing.assert_close(result, accelerator.run_original(torch.ones(3, 4)).detach())
    accelerator.release()


def test_another_thread_may_write_to_what_the_program_holds_while_a_plan_is_made(monkeypatch):
    written = threading.Event()

    def forward(k, p, x):
        if isinstance(x, FakeTensor) and not written.is_set():
            # as a thread of a page, in the middle of the capture
            thread = threading.Thread(target=lambda: setattr(GLOBAL_OBJECT, "last", "interrupted"))
            thread.start(), thread.join(), written.set()
        return x * (2 if GLOBAL_OBJECT.inner is None else 3)

    waiting = threading.Event()
    other = threading.Thread(target=waiting.wait, daemon=True)
    other.start()
    GLOBAL_OBJECT.last = None
    model = built(forward, Kept())
    accelerator = fast(model)
    run(model, 1)
    assert GLOBAL_OBJECT.last == "interrupted" and not accelerator.plans
    run(model, 3)
    assert len(accelerator.plans) == 1
    waiting.set()
    accelerator.release()
    GLOBAL_OBJECT.last = None


class Host:
    """An object of a program, of which code of the forward names one attribute."""

    scale = 2.0

    def __init__(self):
        self.progress = types.SimpleNamespace(text="")


HOST = Host()


def reads_the_host(part, x):
    return x * HOST.scale


def test_what_no_code_of_the_forward_names_may_change_while_a_plan_is_made(monkeypatch):
    record = capture.record

    def recorded(*args, **kwargs):
        # a program shows what is going on
        HOST.progress.text = f"recording {time.time()}"
        return record(*args, **kwargs)

    monkeypatch.setattr(capture, "record", recorded)
    ours = Root(lambda: reads_the_host)
    accelerator = fast(ours)
    run(ours)
    (plan,) = accelerator.plans.values()
    assert plan.replays >= 2 and "recording" in HOST.progress.text
    accelerator.release()
