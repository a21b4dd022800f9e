"""What a trace of the profiler is read for, on traces made by hand and on one of a CPU."""

from __future__ import annotations

import pytest
import torch

from sfast_ext.tools.lib import rates, trace

RANGE, KERNEL, RUNTIME = trace.RANGE, trace.KERNEL, "cuda_runtime"


def event(name, category, start, duration, correlation=None, operation=None):
    args = {} if correlation is None else {"correlation": correlation}
    if operation is not None:
        args["External id"] = operation
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": args}


def test_calls_are_told_apart_and_kernels_counted_without_copies():
    events = trace.parse(
        {
            "traceEvents": [
                {"ph": "M", "name": "process_name", "ts": 0},
                event("call b", RANGE, 20_000, 400),
                event("call a", RANGE, 10_000, 300),
                event("before", KERNEL, 5_000, 10),
                event("k2", KERNEL, 10_100, 10),
                event("k1", KERNEL, 10_050, 10),
                event("Memcpy DtoD", "gpu_memcpy", 10_150, 10),
                event("call b", trace.RANGE_ON_DEVICE, 20_050, 10),
                event("k3", KERNEL, 20_050, 10),
                event("cudaGraphLaunch", RUNTIME, 20_100, 10, correlation=1),
                event("where the GPU's clock is far off", KERNEL, 10_060, 10, correlation=1),
                event("Memset", "gpu_memset", 20_080, 10),
            ]
        }
    )
    assert [e.name for e in trace.of_call(events, "a")] == ["k1", "k2", "Memcpy DtoD"]
    assert trace.count(trace.of_call(events, "a")) == (2, 1)
    assert trace.count(trace.of_call(events, "b")) == (2, 1)
    with pytest.raises(ValueError, match="0 calls named 'c'"):
        trace.of_call(events, "c")


def test_a_kernel_belongs_to_the_range_it_was_launched_in():
    events = trace.parse(
        {
            "traceEvents": [
                event("node a", RANGE, 0, 100),
                event("node b", RANGE, 200, 100),
                event("node c", RANGE, 400, 100),
                event("inner", RANGE, 210, 10),
                event("launch", RUNTIME, 50, 10, correlation=1),
                event("driver's launch", "cuda_driver", 250, 10, correlation=2),
                event("aten::mm", trace.OPERATION, 420, 50, operation=9),
                event("late launch", RUNTIME, 330, 10, correlation=5),
                event("node a", trace.RANGE_ON_DEVICE, 5000, 100),
                # long after: the GPU lags behind
                event("by launch", KERNEL, 1000, 10, correlation=1),
                event("by the driver's", KERNEL, 1100, 10, correlation=2),
                event("by operation", KERNEL, 1200, 10, correlation=3, operation=9),
                event("contradicted", KERNEL, 1300, 10, correlation=1, operation=9),
                event("near", KERNEL, 1400, 10, correlation=5),
                event("by span", KERNEL, 5050, 10, correlation=77),
                event("lost", KERNEL, 9000, 10),
            ]
        }
    )
    kernels = [e for e in events if e.category == KERNEL]
    names, told = trace.attribute(events, kernels, "node ")
    assert names == ["node a", "node b", "node c", "node a", "node b", "node a", None]
    assert told == {"launch": 3, "operation": 1, "span on the GPU": 1, "nearest": 1, "nothing": 1, "disagree": 1}


def test_a_recording_has_the_ranges_of_its_calls():
    device = torch.device("cpu")
    x = torch.randn(8, 8)
    events = trace.record({"first": lambda: x @ x, "second": lambda: x + x}, device)
    ranges = {e.name: e for e in events if e.category == RANGE}
    assert list(ranges) == ["call first", "call second"]
    assert trace.of_call(events, "first") == []
    inside = [e.name for e in events if e.category == trace.OPERATION and e.start >= ranges["call second"].start]
    assert "aten::add" in inside and "aten::mm" not in inside
    # far enough apart for what the clocks may differ by
    assert ranges["call second"].start - ranges["call first"].end > 2 * trace.APART


def test_flops_of_a_product_and_its_rate():
    a = torch.randn(4, 5)
    assert rates.flops(lambda: a @ a.T) == 2 * 4 * 5 * 4
    product, copy = rates.Product(torch.device("cpu"), 16), rates.Copy(torch.device("cpu"), 1000)
    assert product.work == 2 * 16**3 and torch.allclose(product(), product._a @ product._b)
    assert copy.work == 2000 and torch.equal(copy(), copy._from)
    assert rates.tera(copy, [1.0, 2e-6, 2e-6]) == pytest.approx(1.0)
