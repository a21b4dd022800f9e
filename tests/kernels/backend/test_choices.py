"""Which of several ways runs a shape: how it is chosen, when that is found out, and what is kept of it."""

from __future__ import annotations

import json

import pytest
import torch

from sfast_ext.kernels.backend import choices, launch_log
from sfast_ext.kernels.backend.choices import OWN, Choice, Choices, Memory, machine_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(choices, "_memories", {})
    return tmp_path


class Bench:
    """Functions that give ones, with times of their own."""

    def __init__(self, file=None, **times):
        self.times = times
        self.runs = []
        self.timed = []
        self.capturing = False
        self.memory = Memory(file, {})
        self.choices = Choices("sum", self._clock, lambda: not self.capturing, lambda device: self.memory)

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

    def __call__(self, key="shape", seconds=None):
        """Who ran."""
        self.runs.clear()
        others = {name: self.function(name) for name in self.times if name != OWN}
        with choices.measuring(seconds):
            assert torch.equal(self.choices.run(CPU, key, self.function(OWN), others), torch.ones(2, 3))
        self.memory.save()
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


def test_nothing_is_measured_outside_of_a_budget():
    bench = Bench(torch=1.0, flash=0.5)
    bench.choices.run(CPU, "shape", bench.function(OWN), {"flash": bench.function("flash")})
    assert bench.runs == [OWN] and not bench.timed


def test_a_budget_that_is_spent_leaves_shapes_to_later(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(choices.time, "perf_counter", lambda: next(now))
    bench = Bench(torch=1.0, flash=0.5)
    others = {"flash": bench.function("flash")}
    with choices.measuring(1.5) as budget:
        for key in ("first", "second", "third"):
            bench.choices.run(CPU, key, bench.function(OWN), others)
        assert budget.left == -0.5  # a second for each
    assert bench.runs[-1] == OWN and len(bench.timed) == 4
    assert bench("third") == "flash"


@pytest.mark.parametrize(
    ("milliseconds", "runs"),
    [(0.0, [1, 4, 4, 4]), (0.5, [1, 4, 4, 4]), (0.9, [1, 2, 2, 2]), (3.0, [1, 1, 1, 1]), (40.0, [1])],
)
def test_what_takes_long_is_measured_less_often(monkeypatch, milliseconds, runs):
    seen = []

    def once(run, count, head_start):
        seen.append(count)
        return milliseconds

    monkeypatch.setattr(choices.gpu_clock, "milliseconds", once)
    assert choices._milliseconds(lambda: torch.ones(1)) == milliseconds
    assert seen == runs


def test_measurements_are_nothing_to_be_repeated():
    bench = Bench(torch=2.0, other=1.0)
    heard = []
    with launch_log.listening(heard.append):
        assert bench() == "other"
        assert heard == [launch_log.Opaque("measurements")]
        assert bench() == "other" and len(heard) == 1


def test_a_clock_that_fails_leaves_the_shape_as_it_was():
    bench = Bench(torch=1.0, flash=0.5)

    def broken(run):
        raise RuntimeError("no events here")

    bench.choices._clock = broken
    assert bench() == OWN and bench.memory.choices() == {}


def test_choices_are_kept_on_disk(cache):
    file = cache / "choices.json"
    assert Bench(file, torch=1.0, flash=0.5)() == "flash"
    again = Bench(file, torch=0.1, flash=0.5)
    assert again(seconds=0.0) == "flash" and not again.timed
    # another set of candidates is another question
    assert Bench(file, torch=0.1, flash=0.5, cutlass=0.2)() == OWN
    kept = Memory(file, {}).choices()["sum"]
    assert kept["shape of flash"] == Choice("flash", {OWN: 1.0, "flash": 0.5}) and len(kept) == 2


def test_two_processes_add_to_one_file(cache):
    file = cache / "choices.json"
    mine, theirs = Bench(file, torch=1.0, flash=0.5), Bench(file, torch=1.0, flash=0.5)
    assert mine("a") == theirs("b") == "flash"
    assert set(Memory(file, {}).choices()["sum"]) == {"a of flash", "b of flash"}
    # and the lock of the two
    assert sorted(each.name for each in cache.iterdir()) == [".turn", "choices.json"]


@pytest.mark.parametrize(
    "spoilt",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 1}',
        '{"format": 99, "choices": {"sum": {"shape of flash": {"chosen": "flash", "ms": {}}}}}',
        '{"format": 1, "choices": []}',
        '{"format": 1, "choices": {"sum": 3}}',
        '{"format": 1, "choices": {"sum": {"shape of flash": {"chosen": "flash", "ms": 3}}}}',
        '{"format": 1, "choices": {"sum": {"shape of flash": {"chosen": "flash", "ms": {"flash": "fast"}}}}}',
        '{"format": 1, "choices": {"sum": {"shape of flash": {"ms": {}}}}}',
    ],
)
def test_a_spoilt_file_is_measured_anew(cache, spoilt):
    file = cache / "choices.json"
    file.write_text(spoilt)
    bench = Bench(file, torch=1.0, flash=0.5)
    assert bench() == "flash" and bench.timed
    assert json.loads(file.read_text())["choices"]["sum"]["shape of flash"]["chosen"] == "flash"


def test_a_choice_that_is_not_there_any_more_is_not_taken(cache):
    file = cache / "choices.json"
    file.write_text('{"format": 1, "choices": {"sum": {"shape of flash": {"chosen": "gone", "ms": {}}}}}')
    assert Bench(file, torch=1.0, flash=0.5)() == OWN


def test_a_folder_that_cannot_be_written_costs_nothing(cache):
    (cache / "file").write_text("")
    bench = Bench(cache / "file" / "choices.json", torch=1.0, flash=0.5)
    assert bench() == "flash" and bench() == "flash"


def test_the_machine_tells_versions_and_sources(monkeypatch):
    found = machine_of(CPU)
    assert found["torch"] == torch.__version__ and found["gpu"] == "cpu" and len(found["sources"]) == 16
    before = choices.memory_of(CPU)
    assert choices.memory_of(CPU) is before
    monkeypatch.setattr(torch, "__version__", "9.9")
    monkeypatch.setattr(choices, "_memories", {})
    assert choices.memory_of(CPU).file != before.file and machine_of(CPU) != found
