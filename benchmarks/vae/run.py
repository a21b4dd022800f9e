"""One call of a VAE's decoder or encoder, ways to run it side by side.

    python -m benchmarks.vae --json benchmarks/results/vae-h200.json
    python -m benchmarks.vae --case decoder:1024x1024:float16 --without triton

All cases run in one process, the ways of a case in turns, so ratios are of one run. A VAE is called once for an image:
none of the ways has a CUDA graph. torch.compile is left out once `--seconds` have passed, as it compiles each case for
longer than all else takes; the cases that matter most come first.

Ours is as hosts run it: its first call is the one that makes the plan, the second of all. memory MB is what one call
holds at its peak beside weights and arguments; first_call_mb, in the file, what the first call does. `limit ms` is what
the FLOPs of a call would take at the rate of a large matrix product in float16, measured in turns with the ways.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import records, vaes
from sfast_ext import Config, accelerate, cli
from sfast_ext.accelerator import Accelerator
from sfast_ext.runtime.verify import relative_error
from sfast_ext.tools.lib import engines, machine, rates
from sfast_ext.tools.lib.exact import tf32, without_tf32
from sfast_ext.tools.text import number, significant, table

OURS, COMPILED = "sfast", "torch-compile"
WAYS = (OURS, COMPILED, "eager-channels-last", "eager")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
ROUNDS = 4
_PRODUCT = "matrix product"
_COLUMNS = ("way", "p50 ms", "against ours", "memory MB", "of eager's", "first call s", "error", "of the limit %")
_MOST_KERNELS = 14


class Case(NamedTuple):
    """A part of a VAE, a size in pixels and a dtype by name."""

    part: str
    width: int
    height: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.part}:{self.width}x{self.height}:{self.dtype}"


CASES = [
    Case("decoder", 512, 512, "float16"),
    Case("decoder", 1024, 1024, "float16"),
    Case("decoder", 1024, 1024, "bfloat16"),
    Case("decoder", 1024, 1024, "float32"),
    Case("encoder", 1024, 1024, "float16"),
    Case("decoder", 512, 512, "float32"),
    Case("decoder", 512, 512, "bfloat16"),
    Case("encoder", 512, 512, "float16"),
    Case("encoder", 1024, 1024, "float32"),
    Case("encoder", 512, 512, "bfloat16"),
]


def case(text: str) -> Case:
    """PART:WIDTHxHEIGHT:DTYPE."""
    part, _, rest = text.partition(":")
    size, _, dtype = rest.partition(":")
    if part not in vaes.PARTS or dtype not in DTYPES:
        parts, dtypes = " or ".join(vaes.PARTS), ", ".join(DTYPES)
        raise argparse.ArgumentTypeError(f"{text}: the part is {parts}, the dtype {dtypes}")
    return Case(part, *cli.size(size, 8), dtype)


class Way:
    """One way to run a part; see `engines.Engine`."""

    def __init__(self, name: str, module: nn.Module, x: torch.Tensor, triton: bool) -> None:
        self.name = name
        self._accelerator: Accelerator | None = None
        self._module: Callable[[torch.Tensor], Any] = module
        self._x = x.contiguous(memory_format=torch.channels_last) if name == "eager-channels-last" else x
        if name == OURS:
            # kept even where slower: what is measured here is the plan, whatever it is
            on_cpu = not x.is_cuda
            config = Config(
                allow_cpu=on_cpu,
                cuda_graphs=False,
                drop_slower=False,
                triton=triton,
                rare_calls=True,
                rare_gain=math.inf,
            )
            self._accelerator = accelerate(module, config)
            # the second call makes the plan
            self()
        elif name == COMPILED:
            torch._dynamo.reset()
            self._x = x.contiguous(memory_format=torch.channels_last)
            self._module = torch.compile(module, fullgraph=True, dynamic=False)

    def __call__(self) -> torch.Tensor:
        return self._module(self._x)

    def status(self) -> dict[str, Any]:
        """Of ours: its plan, and what went wrong."""
        if self._accelerator is None:
            return {}
        report, plans = self._accelerator.report.as_dict(), self._accelerator.status()["plans"]
        wrong = [*report["reasons"], *([report["last_error"]["message"]] if report["last_error"] else [])]
        found = {"plan": plans[-1]} if plans else {}
        return found if plans and not wrong else {**found, "remark": "; ".join(wrong) or "no plan ran"}

    def stop(self) -> None:
        """Give back what it took."""
        if self._accelerator is not None:
            self._accelerator.release()
        if self.name == COMPILED:
            torch._dynamo.reset()


class Bench:
    """Measures cases on one device.

    Args:
        model: a name of `vaes.CONFIGURATIONS`.
        seconds: torch.compile is not started later than this.
        kernels: whether to list what took the GPU's time.
    """

    def __init__(self, device: torch.device, model: str, iterations: int, seconds: float, triton: bool, kernels: bool):
        self._device, self._iterations, self._triton, self._kernels = device, iterations, triton, kernels
        self._until = time.perf_counter() + seconds
        self._exact = vaes.random_vae(model, device=device)
        self._product = rates.Product(device)
        self._dtype: str | None = None
        self._forms: dict[bool, nn.Module] = {}

    def measure(self, wanted: Case, ways: Sequence[str]) -> list[dict[str, Any]]:
        """A row for each way."""
        dtype = DTYPES[wanted.dtype]
        if self._dtype != wanted.dtype:
            self._forms.clear()
            # two copies: what changes the layout of weights, and what leaves it
            self._forms = {last: nn.Module.to(copy.deepcopy(self._exact), dtype) for last in (False, True)}
            self._forms[True].to(memory_format=torch.channels_last)
            self._dtype = wanted.dtype
        x = vaes.part_input(wanted.part, wanted.width, wanted.height, dtype=dtype, device=self._device)
        with torch.no_grad():
            with without_tf32():
                reference = getattr(self._exact, wanted.part)(x.float()).float()
            # as WebUIs have it
            with tf32(True, True):
                return self._rows(wanted, ways, x, reference)

    def _rows(
        self, wanted: Case, ways: Sequence[str], x: torch.Tensor, reference: torch.Tensor
    ) -> list[dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        running: dict[str, Way] = {}
        for name in sorted(ways, key=WAYS[::-1].index):
            if name == COMPILED and time.perf_counter() > self._until:
                continue
            # ours has a copy of its own: it lays weights out
            module = getattr(self._forms[name not in ("eager", OURS)], wanted.part)
            way: Way | None = None
            try:
                way = Way(name, copy.deepcopy(module) if name == OURS else module, x, self._triton)
                held = self._held()
                found[name] = {"first_call_s": self._seconds(way), "first_call_mb": self._peak(held)}
                found[name] |= self._first(way, reference)
                running[name] = way
            except Exception as exc:
                # one way that does not work here is no reason to lose the others
                found[name] = {"failed": f"{type(exc).__name__}: {next(iter(str(exc).strip().splitlines()), '')}"}
                if way is not None:
                    way.stop()
        times = self._times(running)
        rate = rates.tera(self._product, times[_PRODUCT])
        flops = rates.flops(lambda: getattr(self._forms[False], wanted.part)(x))
        limit = 1e3 * flops / rate / rates.TERA
        rows = []
        for name in [n for n in WAYS if n in found]:
            row: dict[str, Any] = {**wanted._asdict(), "way": name, **found[name]}
            if name in running:
                taken = sorted(times[name])
                row |= {f"ms_p{p}": significant(taken[len(taken) * p // 100]) for p in (20, 50, 80)}
                row |= {"flops": flops, "limit_ms": significant(limit), **running[name].status()}
                if self._kernels and name != COMPILED:
                    row["kernels"] = kernels(running[name], self._device)
            rows.append(row)
        for way in running.values():
            way.stop()
        return rows

    def _seconds(self, way: Way) -> float:
        machine.synchronise(self._device)
        started = time.perf_counter()
        way()
        machine.synchronise(self._device)
        return round(time.perf_counter() - started, 2)

    def _first(self, way: Way, reference: torch.Tensor) -> dict[str, Any]:
        """Error and memory: ours ran the original first and runs its plan now."""
        error = relative_error([way().float()], [reference])
        held = self._held()
        way()
        return {"error": error, "memory_mb": self._peak(held)}

    def _held(self) -> int:
        """Bytes in use before a call of which `_peak` tells the most."""
        if self._device.type != "cuda":
            return 0
        machine.free_memory(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)

    def _peak(self, held: int) -> int | None:
        machine.synchronise(self._device)
        return None if self._device.type != "cuda" else (torch.cuda.max_memory_allocated(self._device) - held) >> 20

    def _times(self, running: dict[str, Way]) -> dict[str, list[float]]:
        clock = engines.Clock(self._device)
        calls: dict[str, Callable[[], torch.Tensor]] = {**running, _PRODUCT: self._product}
        taken: dict[str, list[float]] = {name: [] for name in calls}
        each = max(1, -(-self._iterations // ROUNDS))
        for _ in range(ROUNDS):
            # in turns, so that a clock that slows down in the heat slows all of them down
            for name, call in calls.items():
                taken[name] += clock.times(call, each)
        return taken


def kernels(way: Callable[[], Any], device: torch.device) -> dict[str, list[float]]:
    """Milliseconds and launches of the GPU kernels of a call that take longest, by name."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            way()
            machine.synchronise(device)
        events = [e for e in seen.key_averages() if _gpu_us(e) > 0]
    except Exception as exc:
        return {f"{type(exc).__name__}: {exc}": []}
    events.sort(key=_gpu_us, reverse=True)
    return {e.key[:90]: [significant(_gpu_us(e) / 1e3, 4), e.count] for e in events[:_MOST_KERNELS]}


def _gpu_us(event: Any) -> float:
    # named after CUDA before torch 2.4
    found: Any = getattr(event, "self_device_time_total", None) or getattr(event, "self_cuda_time_total", 0.0)
    return float(found)


def words(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of a case as a table."""
    by_way = {row["way"]: row for row in rows}
    ours, eager = by_way.get(OURS, {}), by_way.get("eager", {})
    lines = []
    for row in rows:
        if "failed" in row:
            lines.append((row["way"], "failed", *[""] * (len(_COLUMNS) - 2)))
            continue
        base, held, stock = ours.get("ms_p50"), row["memory_mb"], eager.get("memory_mb")
        lines.append(
            (
                row["way"],
                number(row["ms_p50"], 2),
                number(row["ms_p50"] / base if base else None, 2),
                number(held, 0),
                number(held / stock if held is not None and stock else None, 2),
                number(row["first_call_s"], 1),
                f"{row['error']:.1e}",
                number(100 * row["limit_ms"] / row["ms_p50"], 0),
            )
        )
    notes = [
        f"{row['way']}: {row.get('failed') or row['remark']}" for row in rows if "failed" in row or "remark" in row
    ]
    first = rows[0]
    return "\n".join([str(Case(*(first[f] for f in Case._fields))), table(_COLUMNS, lines), *notes])


def main(given: Sequence[str] | None = None) -> int:
    """Measure; 1 where a way failed or ours ran no plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=case, action="append", metavar="PART:WxH:DTYPE", help="default: all")
    parser.add_argument("--model", choices=vaes.CONFIGURATIONS, default="sd")
    parser.add_argument("--ways", default=",".join(WAYS), help="default: %(default)s")
    parser.add_argument("--iterations", type=int, default=12, help="timed calls of each way (%(default)s)")
    parser.add_argument("--seconds", type=float, default=75, help="torch.compile is not started later (%(default)s)")
    parser.add_argument("--without", choices=["triton"], help="as those have it who lack Triton")
    parser.add_argument("--kernels", action="store_true", help="also list what took the GPU's time, in the file")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(given)
    ways = args.ways.split(",")
    if not set(ways) <= {*WAYS}:
        parser.error(f"--ways: there are {', '.join(WAYS)}")
    device = machine.device()
    bench = Bench(device, args.model, args.iterations, args.seconds, args.without is None, args.kernels)
    head = {**machine.describe(), "model": args.model, "iterations": args.iterations, "without": args.without}
    rows: list[dict[str, Any]] = []
    for each in args.case or CASES:
        try:
            found = bench.measure(each, ways)
        except Exception as exc:
            found = [{**each._asdict(), "way": way, "failed": f"{type(exc).__name__}: {exc}"} for way in ways]
        rows += found
        print(f"{words(found)}\n", flush=True)
        if args.json is not None:
            # as soon as they are there: what was measured is kept if the rest does not come to its end
            args.json.parent.mkdir(parents=True, exist_ok=True)
            records.write(args.json, {**head, "rows": rows})
    missing = any("failed" in row or "remark" in row for row in rows)
    if missing:
        print("something failed, see above", file=sys.stderr)
    return int(missing)
