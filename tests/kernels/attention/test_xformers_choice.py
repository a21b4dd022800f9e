"""xformers' kernels beside PyTorch's: who is chosen, and when it is found out."""

from __future__ import annotations

import sys

import pytest
import torch

from kernels.support import randn
from sfast_ext.kernels.attention import attention, xformers_choice
from sfast_ext.kernels.attention.xformers_choice import OWN, Choices, candidates


class Bench:
    """Functions that give ones, with times of their own."""

    def __init__(self, **times):
        self.times = times
        self.runs = []
        self.timed = []
        self.capturing = False
        self.choices = Choices(self._clock, lambda: not self.capturing)

    def function(self, name):
        def run():
            self.runs.append(name)
            wrong = self.times[name]
            if isinstance(wrong, Exception):
                raise wrong
            return wrong if isinstance(wrong, torch.Tensor) else torch.ones(2, 3)

        run.name = name
        return run

    def _clock(self, run):
        self.timed.append(run.name)
        run()
        return self.times[run.name]

    def __call__(self, key="shape"):
        """Who ran."""
        self.runs.clear()
        others = {name: self.function(name) for name in self.times if name != OWN}
        assert torch.equal(self.choices.run(key, self.function(OWN), others), torch.ones(2, 3))
        return self.runs[-1]


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"torch": 1.0, "flash": 0.5, "cutlass": 0.7}, "flash"),
        ({"torch": 1.0, "flash": 0.7, "cutlass": 0.5}, "cutlass"),
        ({"torch": 1.0, "flash": 0.97}, "flash"),
        ({"torch": 1.0, "flash": 0.985, "cutlass": 0.99}, "torch"),
        ({"torch": 1.0, "flash": 1.5, "cutlass": 2.0}, "torch"),
        # of two alike the first
        ({"torch": 1.0, "flash": 0.5, "cutlass": 0.5}, "flash"),
        ({"torch": 1.0, "cutlass": 0.5, "flash": 0.5}, "cutlass"),
        ({"torch": 1.0, "flash": ValueError("not supported"), "cutlass": 0.9}, "cutlass"),
        ({"torch": 1.0, "flash": torch.cuda.OutOfMemoryError("too much")}, "torch"),
        ({"torch": 1.0, "flash": torch.full((2, 3), float("nan"))}, "torch"),
        ({"torch": 1.0, "flash": torch.zeros(2, 3)}, "torch"),
        ({"torch": 1.0, "flash": torch.ones(3, 2)}, "torch"),
        ({"torch": 1.0, "flash": torch.ones(2, 3).half()}, "torch"),
    ],
)
def test_the_quickest_that_is_right_is_chosen_and_remembered(times, chosen):
    bench = Bench(**times)
    assert bench() == chosen
    timed = list(bench.timed)
    assert bench() == chosen and bench.runs == [chosen] and bench.timed == timed
    # another shape is another question
    assert bench("other") == chosen and len(bench.timed) == 2 * len(timed)


def test_nothing_is_timed_while_a_cuda_graph_is_captured():
    bench = Bench(torch=1.0, flash=0.5)
    bench.capturing = True
    assert bench() == OWN and bench.runs == [OWN] and not bench.timed
    bench.capturing = False
    assert bench() == "flash"
    bench.capturing = True
    assert bench() == "flash" and bench.runs == ["flash"]


def test_one_that_raises_later_is_put_aside():
    bench = Bench(torch=1.0, flash=0.5)
    assert bench() == "flash"
    bench.times["flash"] = RuntimeError("another day")
    assert bench() == OWN and bench.runs == ["flash", OWN]
    assert bench() == OWN and bench.runs == [OWN]


def test_memory_that_runs_out_is_the_callers_concern():
    bench = Bench(torch=1.0, flash=0.5)
    assert bench() == "flash"
    bench.times["flash"] = torch.cuda.OutOfMemoryError("too much")
    with pytest.raises(torch.cuda.OutOfMemoryError):
        bench()
    bench.times["flash"] = 0.5
    assert bench() == "flash"


Q, K = (2, 3, 8, 16), (2, 3, 5, 16)


def values(*shape, dtype=torch.float16, device="cpu"):
    return randn(*shape, dtype=dtype, device=torch.device(device))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"mask": (1, 1, 8, 5)}, {"mask": (8, 5)}])
def test_candidates_give_what_pytorch_gives(xformers, dtype, options):
    q, k, v = (values(*shape, dtype=dtype) for shape in (Q, K, K))
    mask = values(*options["mask"], dtype=dtype) if "mask" in options else None
    causal, scale = options.get("is_causal", False), options.get("scale")
    found = candidates(q, k, v, mask, causal, scale)
    assert list(found) == ["flash", "cutlass"]
    wide = None if mask is None else mask.float()
    expected = attention.reference(q.float(), k.float(), v.float(), wide, causal, scale)
    if "mask" in options:
        with pytest.raises(ValueError, match="attn_bias"):
            found.pop("flash")()
    for run in found.values():
        result = run()
        assert result.shape == expected.shape and result.dtype == dtype
        torch.testing.assert_close(result.float(), expected, atol=0.02, rtol=0.02)


def test_who_is_no_candidate(xformers):
    q, k = values(*Q), values(*K)
    assert candidates(q, k, k, None, False, None)
    assert not candidates(q.float(), k.float(), k.float(), None, False, None)
    assert not candidates(q[0], k[0], k[0], None, False, None)
    assert not candidates(q, k[:, :1], k[:, :1], None, False, None)
    assert not candidates(q, k, k, torch.ones(8, 5, dtype=torch.bool), False, None)


@pytest.mark.parametrize("there", [False, None])
def test_without_xformers_nothing_is_looked_for(monkeypatch, there):
    for name in [name for name in sys.modules if name.partition(".")[0] == "xformers"]:
        monkeypatch.delitem(sys.modules, name)
    if there is None:
        monkeypatch.setitem(sys.modules, "xformers", None)
    q = values(*Q)
    assert candidates(q, q, q, None, False, None) == {}
    assert "xformers.ops" not in sys.modules


def test_the_library_asks_the_candidates(xformers, monkeypatch):
    q, k, v = (values(*shape, dtype=torch.bfloat16) for shape in (Q, K, K))
    timed = []

    def clock(run):
        run()
        timed.append(run)
        return 1.0 / len(timed)

    monkeypatch.setattr(attention, "_choices", Choices(clock, lambda: True))
    used = []
    op = xformers.ops.fmha.cutlass.FwOp
    applied = op.apply
    monkeypatch.setattr(op, "apply", lambda *args, **kwargs: used.append(1) or applied(*args, **kwargs))
    for _ in range(2):
        result = attention._quickest(q, k, v, None, False, 0.5)
        expected = attention.reference(q.float(), k.float(), v.float(), scale=0.5)
        torch.testing.assert_close(result.float(), expected, atol=0.02, rtol=0.02)
    assert len(timed) == 3
    # looked at, timed, and run twice
    assert len(used) == 4
    # on a CPU nobody is asked
    monkeypatch.setattr(xformers_choice, "candidates", None)
    attention.fallback(q, k, v)


def test_a_scaled_dot_product_attention_that_somebody_replaced_is_not_called(monkeypatch):
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    q = values(*Q, dtype=torch.float32)
    assert attention.fallback(q, q, q).shape == q.shape


@pytest.mark.gpu
def test_on_a_gpu_the_stand_in_is_timed_and_left(xformers, monkeypatch):
    choices = Choices()
    monkeypatch.setattr(attention, "_choices", choices)
    q = values(2, 8, 1024, 64, device="cuda")
    first, again = attention.fallback(q, q, q), attention.fallback(q, q, q)
    expected = attention.reference(q, q, q)
    for result in (first, again):
        torch.testing.assert_close(result, expected, atol=0.01, rtol=0.01)
    # it writes out all scores in float32
    assert list(choices._chosen.values()) == [OWN]
