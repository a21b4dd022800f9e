"""`python -m sfast_ext bench`: one UNet call as a WebUI makes it under guidance, and other ways to run it."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sfast_ext.runtime.verify import relative_error
from sfast_ext.tools.lib import engines, exact, machine, models, names, pace, pipelines, rates, trace, transformers
from sfast_ext.tools.lib.ways import OURS, Way, side_by_side, words_of
from sfast_ext.tools.text import number, significant, table

ROUNDS = 6
COLUMNS = ("engine", "p50 ms", "p20", "p80", "times as long", "first call s", "error to fp32", "memory MB")
FULL_COLUMNS = ("kernels", "of the limit %")
# pixels that the further size of a full measurement is wider by
WIDER = 64
PRODUCT = "matrix product"
FURTHER_CALLS = 10
"""Of each way, in addition to those that are timed: its first ones, and one before each round."""

Rows = list[dict[str, Any]]


@dataclass
class Options:
    """The arguments of the command."""

    model: str
    sizes: list[tuple[int, int]]
    batches: list[int]
    engines: list[str]
    iterations: int
    tokens: int
    cold: bool
    cudnn_benchmark: bool
    json: Path | None
    full: bool = False
    """Also kernels launched, FLOPs and the time they would take at the least, and ours at a further size."""
    ours: Way = OURS
    """How ours runs; the others have its attention."""


@dataclass
class Case:
    """What one group of rows measures."""

    width: int
    height: int
    images: int


def cases(options: Options) -> list[Case]:
    """Each size with each number of images."""
    return [Case(width, height, images) for width, height in options.sizes for images in options.batches]


def make_unet(model: str, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A UNet or a transformer by its name, see `names.ALL`, or that of a path.

    Raises:
        Unavailable: it cannot be loaded.
    """
    if model == names.DIGITS:
        return pipelines.trained_pipeline(dtype=dtype, device=device).unet
    if transformers.is_transformer(model):
        return transformers.random_transformer(model, dtype=dtype, device=device)
    if model in models.NAMES + models.TINY_NAMES:
        return models.random_unet(model, dtype=dtype, device=device)
    return pipelines.load_unet(model, dtype=dtype, device=device)


class Bench:
    """Measures ways to run a call side by side.

    Raises:
        Unavailable: an attention, or a GPU to pass for, cannot be had here.
    """

    def __init__(self, options: Options, device: torch.device) -> None:
        self.options, self.device = options, device
        half = "bfloat16" if transformers.is_transformer(options.model) else "float16"
        dtype = options.ours.dtype or (half if device.type == "cuda" else "float32")
        self.dtype: torch.dtype = getattr(torch, dtype)
        # with PyTorch's attention; what references and FLOPs are of
        self._unet = make_unet(options.model, dtype=self.dtype, device=device)
        self._forms: dict[tuple[Any, ...], nn.Module] = {("eager", *Way("eager").model_key): self._unet}
        self.engines: dict[str, engines.Engine] = {}
        self.ways: dict[str, Way] = {}
        for way in side_by_side(options.ours, options.engines):
            if device.type == "cuda" or way.engine not in engines.NEEDS_GPU:
                self.engines[way.engine] = way.start(self._model_for(way))
                self.ways[way.engine] = way
            else:
                print(f"{way.engine} is left out: it needs an NVIDIA GPU", file=sys.stderr, flush=True)

    def _model_for(self, way: Way) -> nn.Module:
        """The model of a way: its own copy, or that of others which leave the weights where they are."""
        form: Any = way
        if way.engine in engines.SHARES_EAGER:
            form = "eager"
        elif way.engine in ("eager-channels-last", "torch-compile"):
            form = "channels-last"
        key = (form, *way.model_key)
        if key not in self._forms:
            self._forms[key] = way.model(copy.deepcopy(self._unet))
        return self._forms[key]

    def _inputs(self, width: int, height: int, images: int) -> transformers.Inputs:
        return transformers.inputs_of(self._unet, width, height, images, tokens=self.options.tokens)

    @torch.no_grad()
    def measure(self, case: Case, keep: Callable[[Rows], None] = lambda rows: None) -> Rows:
        """A row for each engine; `keep` is handed them as soon as they are measured, before the profiler runs."""
        args, kwargs = self._inputs(case.width, case.height, case.images)
        # libraries load and the GPU wakes up: no engine's first call is to pay for that
        with pace.said(self.device, len(self.engines) * (self.options.iterations + FURTHER_CALLS)):
            self._unet(*args, **kwargs)
            machine.synchronise(self.device)
        reference = self._reference(args, kwargs)
        found: dict[str, dict[str, Any]] = {}
        for name, engine in self.engines.items():
            print(f"{name}: first call …", file=sys.stderr, flush=True)
            try:
                found[name] = self._start(engine, args, kwargs, reference)
            except Exception as exc:
                # one way that does not work here, torch.compile without a compiler say, is no reason to lose the others
                found[name] = {"failed": f"{type(exc).__name__}: {_first_line(exc)}"}
                engine.stop()
        running = {name: engine for name, engine in self.engines.items() if "failed" not in found[name]}
        product = rates.Product(self.device) if self.options.full else None
        taken = self._times(running, product)
        head = {"model": self.options.model, "width": case.width, "height": case.height, "images": case.images}
        rows = [self._row(head, name, taken.get(name), row) for name, row in found.items()]
        if product is not None:
            flops = rates.flops(lambda: self._unet(*args, **kwargs))
            self._held_against(rows, flops, rates.tera(product, taken[PRODUCT]))
            self._further(case, rows, running)
            keep(rows)
            self._count_kernels(rows, running)
        for engine in running.values():
            if not isinstance(engine, engines.StableFast):
                engine.stop()
        return rows

    def _row(self, head: dict[str, Any], name: str, taken: list[float] | None, found: dict[str, Any]) -> dict[str, Any]:
        return {**head, **self.ways[name].fields(), **_quantiles(taken), **found}

    def _start(
        self, engine: engines.Engine, args: tuple[Any, ...], kwargs: dict[str, Any], reference: torch.Tensor
    ) -> dict[str, Any]:
        before = self._held()
        first = self._first_call(engine, args, kwargs)
        # ours runs the original first and its plan from the second call on
        row: dict[str, Any] = {
            "first_call_s": first,
            "error_fp32": relative_error([engine.call().float()], [reference]),
            "memory_mb": self._peak(engine, before),
        }
        if isinstance(engine, engines.StableFast):
            row["plan"] = engine.plan()
        remark = engine.remark()
        return {**row, "remark": remark} if remark else row

    def _first_call(self, engine: engines.Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        machine.synchronise(self.device)
        started = time.perf_counter()
        engine.start(args, kwargs)
        engine.call()
        machine.synchronise(self.device)
        return round(time.perf_counter() - started, 3)

    def _times(self, running: dict[str, engines.Engine], product: rates.Product | None) -> dict[str, list[float]]:
        clock = engines.Clock(self.device)
        calls: dict[str, engines.Call] = {name: engine.call for name, engine in running.items()}
        if product is not None:
            calls[PRODUCT] = product
        taken: dict[str, list[float]] = {name: [] for name in calls}
        each = max(1, round(self.options.iterations / ROUNDS))
        while min((len(t) for t in taken.values()), default=self.options.iterations) < self.options.iterations:
            # in turns, so that a clock that slows down in the heat slows all of them down
            for name, call in calls.items():
                taken[name] += clock.times(call, each)
        return taken

    def _held_against(self, rows: Rows, flops: int, rate: float) -> None:
        """What the same FLOPs would take at the rate of a large matrix product, measured in turns with the engines."""
        limit = 1e3 * flops / rate / rates.TERA
        weights = sum(p.numel() * p.element_size() for p in self._unet.parameters()) >> 20
        eager = next((row["memory_mb"] for row in rows if row["engine"] == "eager" and "failed" not in row), None)
        for row in rows:
            row |= {"flops": flops, "matrix_tflops": significant(rate), "limit_ms": significant(limit)}
            row["fraction_of_limit"] = significant(limit / row["ms_p50"]) if row["ms_p50"] else None
            row |= {"weights_mb": weights, "eager_memory_mb": eager}

    def _further(self, case: Case, rows: Rows, running: dict[str, engines.Engine]) -> None:
        """The first call of ours at a further size, in this process; then back."""
        ours = running.get("sfast")
        if ours is None:
            return
        own = ours.args, ours.kwargs
        args, kwargs = self._inputs(case.width + WIDER, case.height, case.images)
        row = next(row for row in rows if row["engine"] == "sfast")
        try:
            row["further_size_s"] = self._first_call(ours, args, kwargs)
            remark = ours.remark()
        except Exception as exc:
            remark = f"at a further size: {type(exc).__name__}: {_first_line(exc)}"
        if remark:
            row["remark"] = remark
        ours.start(*own)

    def _count_kernels(self, rows: Rows, running: dict[str, engines.Engine]) -> None:
        if self.device.type != "cuda":
            return
        for engine in running.values():
            engine.call()
        try:
            events = trace.record({name: engine.call for name, engine in running.items()}, self.device)
            counts = {name: trace.count(trace.of_call(events, name)) for name in running}
        except Exception as exc:
            print(f"the kernels are not counted: {type(exc).__name__}: {_first_line(exc)}", file=sys.stderr, flush=True)
            return
        for row in rows:
            if row["engine"] in counts:
                # none at all: the profiler saw nothing
                row["kernels"], row["copies"] = counts[row["engine"]] if any(counts[row["engine"]]) else (None, None)

    def _reference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        output = exact.Exact(self._unet)(args, kwargs)
        self._held()
        return output

    def _held(self) -> int:
        """Bytes in use; of what CUDA graphs work in all, which is nobody else's between their replays either."""
        if self.device.type != "cuda":
            return 0
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(self.device) + _idle_in_graphs()

    def _peak(self, engine: engines.Engine, before: int) -> int | None:
        """What one call holds at its peak over what was held before this engine started, in MB."""
        if self.device.type != "cuda":
            return None
        self._held()
        torch.cuda.reset_peak_memory_stats(self.device)
        engine.call()
        machine.synchronise(self.device)
        return (torch.cuda.max_memory_allocated(self.device) + _idle_in_graphs() - before) >> 20


def _idle_in_graphs() -> int:
    """Bytes of CUDA graphs' own memory that count as free for the allocator."""
    segments = torch.cuda.memory_snapshot()
    private = [s for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    return sum(s["total_size"] - s["allocated_size"] for s in private)


def _first_line(exc: Exception) -> str:
    return next(iter(str(exc).strip().splitlines()), "")


def _quantiles(taken: list[float] | None) -> dict[str, float | None]:
    if not taken:
        return {"ms_p20": None, "ms_p50": None, "ms_p80": None}
    ordered = sorted(taken)
    return {f"ms_p{p}": significant(ordered[min(len(ordered) - 1, int(len(ordered) * p / 100))]) for p in (20, 50, 80)}


def tables(rows: Rows) -> str:
    """A table for each case; `times as long` is compared with Stable Fast."""
    parts = []
    for case in dict.fromkeys(map(_case, rows)):
        group = [row for row in rows if _case(row) == case]
        ours = next((row["ms_p50"] for row in group if row["engine"] == "sfast"), None)
        full = any("flops" in row for row in group)
        columns = COLUMNS + FULL_COLUMNS * full
        lines: list[tuple[str, ...]] = []
        for row in group:
            if "failed" in row:
                lines.append((row["engine"], "failed", *[""] * (len(columns) - 2)))
                continue
            lines.append(
                (
                    row["engine"],
                    number(row["ms_p50"], 2),
                    number(row["ms_p20"], 2),
                    number(row["ms_p80"], 2),
                    number(row["ms_p50"] / ours if ours else None, 2),
                    number(row["first_call_s"], 1),
                    f"{row['error_fp32']:.2e}",
                    number(row["memory_mb"], 0),
                    *([number(row.get("kernels"), 0), number(100 * row["fraction_of_limit"], 0)] if full else []),
                )
            )
        model, width, height, images = case
        said = {row["engine"]: row.get("failed") or row.get("remark") for row in group}
        notes = [f"{name}: {remark}" for name, remark in said.items() if remark]
        title = ", ".join([f"{model} {width}×{height}", f"{images} at once", *words_of(group[0])])
        parts.append("\n".join([title, table(columns, lines), *notes]))
    return "\n\n".join(parts)


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["width"], row["height"], row["images"]


CACHES = ("TRITON_CACHE_DIR", "SFAST_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
"""The variables that name folders of compiled kernels."""


def in_process(options: Options, case: Case, caches: Path) -> dict[str, Any]:
    """One case in its own process that keeps compiled kernels in this folder: what it wrote as JSON.

    Raises:
        RuntimeError: it ended without a result.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, str(machine.PACKAGE), "bench", "--model", options.model, "--json", str(result)]
        command += ["--size", f"{case.width}x{case.height}", "--batch", str(case.images)]
        command += ["--against", ",".join(options.engines), "--iterations", str(options.iterations)]
        command += ["--tokens", str(options.tokens)] + ["--cudnn-benchmark"] * options.cudnn_benchmark
        command += ["--full"] * options.full
        command += options.ours.arguments()
        kept = {name: str(caches / name) for name in CACHES}
        environment = {**os.environ, **kept}
        ended = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL)
        if not result.exists():
            raise RuntimeError(f"{' '.join(command[1:])} ended with status {ended.returncode} and no result")
        return json.loads(result.read_text(encoding="utf-8"))


def _cold(options: Options) -> Iterator[Rows]:
    """Each case in its own process, with caches of compiled kernels that are empty."""
    for case in cases(options):
        with tempfile.TemporaryDirectory() as folder:
            yield in_process(options, case, Path(folder))["rows"]


def _warm(options: Options, device: torch.device, keep: Callable[[Rows], None]) -> Iterator[Rows]:
    bench = Bench(options, device)
    for case in cases(options):
        yield bench.measure(case, keep)


def main(options: Options) -> int:
    """Measure, print, and write JSON if asked; 1 if ours did not run a plan.

    Raises:
        Unavailable: the model, an attention, or a GPU to pass for, cannot be had here.
    """
    device = machine.device()
    rows: Rows = []
    # ours always lets cuDNN choose by measuring; a stock WebUI does so on a few old cards only
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    asked = ("cold", "cudnn_benchmark", "tokens", "iterations")
    head = {**machine.describe(), **{name: getattr(options, name) for name in asked}, **options.ours.stack()}

    def write(group: Rows) -> None:
        # as soon as they are there: what was measured is kept if the rest does not come to its end
        if options.json is not None:
            options.json.write_text(json.dumps({**head, "rows": rows + group}, indent=1), encoding="utf-8")

    for group in _cold(options) if options.cold else _warm(options, device, write):
        write(group)
        rows += group
        print(f"{tables(group)}\n", flush=True)
    return 1 if any(row["engine"] == OURS.engine and ("failed" in row or row.get("remark")) for row in rows) else 0
