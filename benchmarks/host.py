"""Host time of one accelerated call, stage by stage: `python -m benchmarks.host`.

On a GPU real models replay their CUDA graphs. On a CPU models of the real depth and a tiny width have a plan that
computes nothing, so that what is left is what the accelerator itself takes.

A wait for the GPU empties the processor's caches, and what runs first after it takes a multiple of its time. So a call
is timed straight after a wait; after a wait and what a sampler then does between two calls; and right behind another
call, as where a sampler waits for nothing. Stages are timed in a call, where they add up, and by themselves in a loop.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks import records
from sfast_ext import Accelerator, Config, accelerate
from sfast_ext.behaviour.fingerprint import fingerprint
from sfast_ext.call_signature import Call, flatten_call, rebuild_output
from sfast_ext.plans.graph_pool import CapturedGraph, GraphPool, pool_of
from sfast_ext.report import Report
from sfast_ext.timing import timer
from sfast_ext.tools.lib import models
from sfast_ext.tools.lib.machine import describe

CPU = torch.device("cpu")
THE_LAUNCH = "the launch"
# stands for a wait for the GPU where there is none
PAUSE_S = 0.005
# a clock of coarser steps does not tell the stages of a single call
COARSE_S = 1e-5
# as many modules and weights as the real ones have, next to nothing to compute
_NARROWER = 20
_SMALL: dict[str, Any] = {"norm_num_groups": 16, "sample_size": 8, "cross_attention_dim": 32}
_TEXT = {"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 32 + 6 * 8}


def narrow_unet(name: str) -> nn.Module:
    """A UNet of the real one's modules, a twentieth as wide, on the CPU."""
    from diffusers import UNet2DConditionModel

    config = {**models.unet_config(name), **_SMALL}
    config["block_out_channels"] = tuple(width // _NARROWER for width in config["block_out_channels"])
    # heads, whatever it is called
    config["attention_head_dim"] = (2,) * len(config["block_out_channels"])
    if "projection_class_embeddings_input_dim" in config:
        config.update(_TEXT)
    return models.randomise(UNet2DConditionModel(**config), 0).eval().requires_grad_(False)


class Launch:
    """Stands around a CUDA graph, or in its place, and notes when it was launched and how long that took."""

    def __init__(self, graph: Any = None) -> None:
        self.graph = graph
        self.pool = _NoPool(CPU)
        self.at = self.until = 0.0

    def replay(self) -> None:
        self.at = time.perf_counter()
        if self.graph is not None:
            self.graph.replay()
        self.until = time.perf_counter()


class _NoPool(GraphPool):
    """Without streams to wait for."""

    def begin_use(self) -> Any:
        return None

    def end_use(self, stream: Any = None, captured: Any = None) -> None:
        pass

    def drop(self, captured: CapturedGraph) -> None:
        pass


def launched(accelerator: Accelerator, call: Call) -> Launch:
    """Puts a `Launch` into the one plan of an accelerator; on a CPU it is all that runs."""
    (plan,) = accelerator.plans.values()
    if plan.device.type == "cuda":
        assert plan.graph is not None, plan.no_graph_reason
        launch = Launch(plan.graph.graph)
        plan.graph.graph = launch  # type: ignore[assignment]
        return launch
    outputs = plan.run_eagerly(call.leaves)
    launch = Launch()
    plan.pool, plan.graph = launch.pool, CapturedGraph(launch, outputs, 0)  # type: ignore[arg-type]
    plan._set_static_inputs([leaf.clone() for leaf in call.tensors(CPU)])
    plan.pool._entries[id(plan.graph)] = (plan.graph, lambda: None)
    return launch


def median(run: Callable[[], Any], times: int) -> float:
    """Microseconds of a run."""
    return round(1e3 * statistics.median(timer.times(run, times)), 1)


class Timeline:
    """When a call came to each of its stages; what the stages take adds up to what the call takes."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, float]] = []

    def mark(self, stage: str) -> None:
        self.marks.append((stage, time.perf_counter()))

    def around(self, function: Callable[..., Any], stage: str, then: str) -> Callable[..., Any]:
        """`function` as a stage of its own."""

        def noted(*args: Any) -> Any:
            self.mark(stage)
            try:
                return function(*args)
            finally:
                self.mark(then)

        return noted

    def stages(self) -> dict[str, float]:
        """Seconds; a stage that comes twice counts as one, before the launch and after it."""
        taken: dict[str, float] = {}
        when = "before"
        for (stage, start), (_, end) in zip(self.marks, self.marks[1:]):
            when = "after" if stage == THE_LAUNCH else when
            name = stage if stage == THE_LAUNCH else f"{when}: {stage}"
            taken[name] = taken.get(name, 0.0) + end - start
        return taken


class Marks:
    """Stands in for `report.current`: marks the stages that are set."""

    rehearsal = False
    _line: Timeline

    def __init__(self, line: Timeline) -> None:
        object.__setattr__(self, "_line", line)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "stage":
            self._line.mark(value)


@contextlib.contextmanager
def watched(accelerator: Accelerator, launch: Launch, pool: GraphPool) -> Iterator[Timeline]:
    """Lets the one plan of an accelerator note its stages: those that an error would be told under, and a replay's."""
    (plan,) = accelerator.plans.values()
    line = Timeline()
    parts = [
        (pool, "begin_use", "order of streams", "replay"),
        (plan, "_copy_inputs", "copies in", "replay"),
        (launch, "replay", THE_LAUNCH, "replay"),
        (plan, "_copy_outputs", "copies out", "replay"),
        (pool, "end_use", "order of streams", "replay"),
    ]
    with contextlib.ExitStack() as stack:
        for module in ("runtime.call_server", "runtime.plan_finder", "runtime.plan_runner"):
            stack.enter_context(mock.patch(f"sfast_ext.{module}.current", Marks(line)))
        for home, name, stage, then in parts:
            stack.enter_context(mock.patch.object(home, name, line.around(getattr(home, name), stage, then)))
        yield line


def in_a_call(run: Callable[[], Any], before: Callable[[], Any], line: Timeline, times: int) -> dict[str, float]:
    """What the stages take in a call, microseconds: means over the calls of middling length, which add up."""
    calls = []
    for _ in range(times):
        before()
        line.marks.clear()
        line.mark("into the accelerator")
        run()
        line.mark("end")
        calls.append(line.stages())
    calls.sort(key=lambda stages: sum(stages.values()))
    calls = calls[len(calls) // 4 : -(len(calls) // 4) or None]
    names = dict.fromkeys(name for stages in calls for name in stages)
    found = {name: statistics.fmean(stages.get(name, 0.0) for stages in calls) for name in names}
    return {name: round(1e6 * taken, 1) for name, taken in found.items()}


def whole_call(run: Callable[[], Any], before: Callable[[], Any], launch: Launch, times: int) -> dict[str, float]:
    """The parts of a call that lie before its launch, in it and after it: medians, microseconds."""
    parts: dict[str, list[float]] = {"before the launch": [], THE_LAUNCH: [], "after the launch": []}
    for _ in range(times):
        before()
        started = time.perf_counter()
        run()
        ended = time.perf_counter()
        spans = (launch.at - started, launch.until - launch.at, ended - launch.until)
        for taken, span in zip(parts.values(), spans):
            taken.append(span)
    return {name: round(1e6 * statistics.median(taken), 1) for name, taken in parts.items()}


def measure(name: str, device: torch.device, times: int) -> dict[str, Any]:
    """All stages of one model's call."""
    cuda = device.type == "cuda"
    unet = models.random_unet(name, dtype=torch.float16, device=device) if cuda else narrow_unet(name)
    size = 8 * unet.config.sample_size  # type: ignore[union-attr]
    args, kwargs = models.unet_inputs(unet, size, size)
    accelerator = accelerate(unet, Config(allow_cpu=True, drop_slower=False))
    with torch.no_grad():
        for _ in range(3):
            unet(*args, **kwargs)
        call = flatten_call(args, kwargs, device)
        launch = launched(accelerator, call)
        found: dict[str, Any] = {"modules": sum(1 for _ in unet.modules())}
        found["watched weights"] = accelerator.arena.status()["tracked"]

        def run() -> None:
            unet(*args, **kwargs)

        def wait() -> None:
            if cuda:
                torch.cuda.synchronize(device)
            else:
                time.sleep(PAUSE_S)

        latent, guidance = args[0][:1], 7.5

        def sampler() -> None:
            # Euler's step under guidance, and the next call's input
            wait()
            noise, other = args[0].chunk(2)
            denoised = other + guidance * (noise - other)
            following = latent + (latent - denoised) * 0.5
            torch.cat([following, following])

        def behind_another() -> None:
            # one at a time: where many are queued, a launch waits for room
            wait()
            run()

        told = {"after a wait": wait, "after a sampler's step": sampler, "behind another call": behind_another}
        for when, before in told.items():
            found[f"no generations told, {when}"] = whole_call(run, before, launch, times)
        accelerator.new_generation()
        run()
        for when, before in told.items():
            found[f"within a generation, {when}"] = whole_call(run, before, launch, times)
        pool = pool_of(device) if cuda else launch.pool
        with watched(accelerator, launch, pool) as line:
            for when, before in told.items():
                found[f"within a generation, {when}, by stages"] = in_a_call(run, before, line, times)
        found["each by itself"] = stages(accelerator, args, kwargs, device, times)
    accelerator.release()
    return found


def stages(accelerator: Accelerator, args: tuple, kwargs: dict, device: torch.device, times: int) -> dict[str, float]:
    """What the parts of a call take, each by itself."""
    call = flatten_call(args, kwargs, device)
    (key,) = accelerator.plans
    plan, report, keys = accelerator.plans[key], Report(), accelerator._finder.keys
    assert plan.graph is not None and keys._fingerprint is not None
    fingerprint_read = keys._fingerprint
    pool = pool_of(device) if device.type == "cuda" else _NoPool(CPU)

    def lookup() -> None:
        again = key._replace(signature=call.signature)
        accelerator.plans.get(again)
        accelerator._cache.rejection(again)
        accelerator._cache.touch(again)

    outputs = plan.graph.outputs
    parts: dict[str, Callable[[], Any]] = {
        "device": accelerator._context.device,
        "signature": lambda: flatten_call(args, kwargs, device),
        "lookup": lookup,
        "behaviour at each step": fingerprint_read.unchanged_quick,
        "behaviour where no generations are told": fingerprint_read.unchanged,
        "weights": accelerator.arena.sync,
        "copies in": lambda: plan._copy_inputs(call.leaves),
        "copies in, one by one": lambda: [mine.copy_(leaf) for mine, leaf in zip(plan._inputs, call.leaves)],
        "order of streams": lambda: pool.end_use(pool.begin_use()),
        "copies out": lambda: plan._copy_outputs(outputs),
        "result": lambda: rebuild_output(plan.output_tree, outputs),
        "counters": lambda: report.count("replays"),
    }
    found = {name: median(run, times) for name, run in parts.items()}
    found["behaviour once a generation"] = median(lambda: fingerprint(accelerator.module), 10)
    return found


def main() -> None:
    """Print the numbers, and write them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="sd15,sdxl")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        torch.set_num_threads(1)
    step = timer.step()
    if step > COARSE_S:
        print(f"the clock moves in steps of {1e3 * step:.3g} ms: of the stages of a call only the means tell anything")
    found = {name: measure(name, device, options.calls) for name in options.models.split(",")}
    for name, numbers in found.items():
        print(f"{name}: {numbers['modules']} modules, {numbers['watched weights']} weights; microseconds")
        for group, lines in numbers.items():
            if not isinstance(lines, dict):
                continue
            print(f"  {group}")
            for stage, taken in lines.items():
                print(f"    {stage:<42}{taken:>10.1f}")
    if options.json:
        records.write(options.json, {"machine": describe(), **found})


if __name__ == "__main__":
    main()
