"""One UNet call as different WebUIs have it: each attention, without Triton, as another card; in turns in one process.

    python -m benchmarks.stacks --case sd15:512x512 --case sdxl:1024x1024
    python -m benchmarks.stacks --case tiny-sd15:64x64 --iterations 2      # on a CPU, to try it

Each way has a model and an accelerator of its own, made anew for each of its turns. Prints a table for each case and
what is asked of it, met or not; writes benchmarks/results/stacks-<gpu>.json after each turn.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import records
from benchmarks.unet.run import RESULTS, Case, case, file_for
from sfast_ext.runtime.verify import relative_error
from sfast_ext.tools.bench import make_unet
from sfast_ext.tools.lib import Unavailable, attentions, engines, machine, models
from sfast_ext.tools.lib.ways import OURS, Way
from sfast_ext.tools.text import number, table

ROUNDS = 2
"""Times that each way is started anew and timed."""
CASES = [Case("sd15", 512, 512, 1), Case("sdxl", 1024, 1024, 1)]
CLOSE = 1.02
"""An attention may take so many times SDPA's time and memory."""
MOST_MS = {"sd15:512x512:1": 9.3, "sdxl:1024x1024:1": 41.5}
"""Without Triton, on an NVIDIA H200."""
WITHOUT = Way("sfast", triton=False)
OTHERS = [Way("cudagraph"), Way("eager")]
Row = dict[str, Any]


def ways(device: torch.device) -> list[Way]:
    """What is compared: ours with SDPA first."""
    found = [OURS, *(Way("sfast", attention=name) for name in attentions.NAMES if name != OURS.attention), WITHOUT]
    if device.type != "cuda":
        return [*found, Way("eager")]
    return [*found, Way("sfast", capability=(8, 9)), *OTHERS]


@torch.no_grad()
def measure(wanted: Case, iterations: int, device: torch.device, keep: Callable[[list[Row]], None]) -> list[Row]:
    """A row for each way; `keep` is handed those that are there after each step.

    One way at a time has a model, plans and graphs, and all have their turn in each round. Beside nine others, whose
    graphs share memory, plans of SDXL that were equal in each operation were 3 % apart.
    """
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    unet = make_unet(wanted.model, dtype=dtype, device=device)
    args, kwargs = models.unet_inputs(unet, wanted.width, wanted.height, wanted.images)
    reference = unet(*args, **kwargs)[0]
    head = {"model": wanted.model, "width": wanted.width, "height": wanted.height, "images": wanted.images}
    unet.to("cpu")
    rows: list[Row] = []
    taken: list[list[float]] = []
    for turn in range(ROUNDS):
        for place, way in enumerate(ways(device)):
            if not turn:
                rows.append({**head, **way.fields()})
                taken.append([])
            row, times = rows[place], taken[place]
            if "missing" in row or "failed" in row:
                continue
            model = None
            try:
                model = way.model(copy.deepcopy(unet).to(device))
                first = _turn(way.start(model), args, kwargs, reference, times, -(-iterations // ROUNDS))
                row |= {**first, **row}
            except Unavailable as exc:
                row["missing"] = str(exc)
            except Exception as exc:
                # one way that does not work here is no reason to lose the others
                row["failed"] = f"{type(exc).__name__}: {exc}"
            del model
            machine.free_memory(device)
            row |= _summary(times)
            keep(rows)
    return rows


def _turn(engine: engines.Engine, args: Any, kwargs: Any, reference: torch.Tensor, times: list[float], n: int) -> Row:
    row = _first_call(engine, args, kwargs, reference)
    times += engines.Clock(engine.device).times(engine.call, n)
    engine.stop()
    return row


def _summary(times: list[float]) -> Row:
    times = sorted(times)
    return {f"ms_p{p}": round(times[len(times) * p // 100], 4) for p in (20, 50, 80) if times}


def _first_call(engine: engines.Engine, args: Any, kwargs: Any, reference: torch.Tensor) -> Row:
    started = time.perf_counter()
    engine.start(args, kwargs)
    engine.call()
    machine.synchronise(engine.device)
    row: Row = {"first_call_s": round(time.perf_counter() - started, 3)}
    row["error"] = relative_error([engine.call()], [reference])
    if isinstance(engine, engines.StableFast):
        plan = engine.plan() or {}
        row["remark"] = engine.remark()
        row["memory_mb"] = plan.get("memory_mb")
        row["digest"] = plan.get("digest")
    return row


def verdicts(rows: list[Row], wanted: Case) -> list[tuple[bool, str]]:
    """What is asked of the rows of a case, and whether it is met."""
    measured = {str(_way(row)): row for row in rows if row.get("ms_p50") is not None}
    ours, found = measured.get(str(OURS)), []
    if ours is None:
        return [(False, "ours was not measured")]
    for name in attentions.NAMES:
        row = measured.get(str(Way("sfast", attention=name)))
        if row is None or row is ours:
            continue
        time_ratio = row["ms_p50"] / ours["ms_p50"]
        memory = (row["memory_mb"] or 0) / ours["memory_mb"] if ours["memory_mb"] else 1.0
        alike = row["digest"] == ours["digest"]
        met = time_ratio <= CLOSE and memory <= CLOSE and not row["remark"] and alike
        words = f"{time_ratio:.3f} of the time and {memory:.3f} of the memory of SDPA, "
        found.append((met, f"{name}: {words}{'the same plan' if alike else 'another plan'}"))
    without, graph = measured.get(str(WITHOUT)), measured.get(str(OTHERS[0]))
    if without is not None and graph is not None:
        met = without["ms_p50"] <= graph["ms_p50"]
        found.append((met, f"without Triton {without['ms_p50']:.2f} ms, in a CUDA graph {graph['ms_p50']:.2f} ms"))
    most = MOST_MS.get(str(wanted))
    if without is not None and most is not None:
        found.append((without["ms_p50"] <= most, f"without Triton {without['ms_p50']:.2f} ms, at most {most} wanted"))
    return found


def _way(row: Row) -> Way:
    card = tuple(divmod(int(row["as"].removeprefix("sm_")), 10)) if row["as"] else None
    return Way(row["engine"], row["attention"], row["upcast"], not row["without"], card)  # type: ignore[arg-type]


def words(rows: list[Row], wanted: Case) -> str:
    """The table of a case and its verdicts."""
    lines = [
        (
            str(_way(row)),
            number(row.get("ms_p50"), 3),
            number(row.get("memory_mb"), 0),
            number(row.get("first_call_s"), 1),
            f"{row['error']:.1e}" if "error" in row else "",
            row.get("missing") or row.get("failed") or row.get("remark") or "",
        )
        for row in rows
    ]
    head = ("way", "p50 ms", "memory MB", "first call s", "error", "")
    told = [f"{'met' if met else 'NOT met'}: {what}" for met, what in verdicts(rows, wanted)]
    return "\n".join([str(wanted), table(head, lines), *told])


def main(given: Sequence[str] | None = None) -> int:
    """Measure; 1 where something that is asked for is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=case, action="append", metavar="MODEL:WxH:N", help="default: two")
    parser.add_argument("--iterations", type=int, default=30, help="timed calls of each way (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/stacks-<gpu>.json")
    args = parser.parse_args(given)
    wanted: list[Case] = args.case or CASES
    device, here = machine.device(), machine.describe()
    if device.type != "cuda" and any(each.model not in models.TINY_NAMES for each in wanted):
        print("the full models need a GPU", file=sys.stderr)
        return 1
    file = args.json or RESULTS / file_for(here["gpu"]).name.replace("unet-", "stacks-")
    file.parent.mkdir(parents=True, exist_ok=True)
    done: list[Row] = []

    def keep(rows: list[Row]) -> None:
        records.write(file, {**here, "rows": done + rows})

    met = True
    for each in wanted:
        rows = measure(each, args.iterations, device, keep)
        done += rows
        print(words(rows, each) + "\n", flush=True)
        met = met and all(kept for kept, _ in verdicts(rows, each))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
