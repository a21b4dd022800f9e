"""Whole images on cards of 4 to 12 GB, emulated on a larger GPU, without the extension and with it.

    python -m benchmarks.small_cards                                       # all cases, at most 8 minutes
    python -m benchmarks.small_cards --card 8 --model sdxl --mode medvram-sdxl
    python -m benchmarks.small_cards --card 8 --model tiny-sd15 --mode none --steps 2     # on a CPU, to try it
    python -m benchmarks.small_cards --page benchmarks/results/small-cards-*.json

Each case runs in two processes of its own. Without a flag, with --medvram and --lowvram it is AUTOMATIC1111, with
`balanced` SD.Next. Five images: two of a size, two of another, and the first size again. What was measured is written
to benchmarks/results/small-cards-<gpu>.json after each process, where rows of other cases stay; --page puts it into
docs/small-cards.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import records
from benchmarks.small_cards import life, table
from benchmarks.small_cards.card import small_card
from benchmarks.small_cards.hosts import A1111_MODES, MODES, open_host
from benchmarks.small_cards.parts import NAMES, TINY, build
from benchmarks.unet.run import RESULTS, file_for
from sfast_ext.runtime.plan_runner import out_of_memory
from sfast_ext.runtime.verify import relative_error
from sfast_ext.tools.lib import machine

ROOT = Path(__file__).parents[2]
STEPS, MINUTES, PROCESS_S = 8, 8.0, 100.0
WAYS = ("stock", "ours")


class Case(NamedTuple):
    """A card in GiB, a model, and how the WebUI was started."""

    card: float
    model: str
    mode: str

    def __str__(self) -> str:
        return f"{self.model} on {self.card:g} GB, {self.mode}"


CASES = [
    Case(8, "sdxl", "none"),
    Case(8, "sdxl", "medvram-sdxl"),
    Case(4, "sd15", "none"),
    Case(6, "sdxl", "medvram"),
    Case(8, "sdxl", "balanced"),
    Case(4, "sd15", "medvram"),
    Case(12, "sdxl", "none"),
    Case(4, "sd15", "balanced"),
    Case(6, "sd15", "none"),
    Case(8, "sd15", "none"),
    Case(12, "sdxl", "medvram-sdxl"),
    Case(12, "sdxl", "balanced"),
    Case(6, "sdxl", "lowvram"),
]
"""What matters most comes first: the time may be over before the last."""
SIZES = {"sd15": [(512, 512), (512, 768)], "sdxl": [(1024, 1024), (832, 1216)]}


def sizes(model: str) -> list[tuple[int, int]]:
    """Those of the images, in their order."""
    first, other = SIZES.get(model, [(64, 64), (64, 96)])
    return [first, first, other, other, first]


def one(
    case: Case,
    ours: bool,
    steps: int,
    file: Path,
    eight_bits: bool = False,
    images: int | None = None,
    turn: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> None:
    """Live a case in this process, and write what came of it, also where it fails.

    Args:
        images: only so many, all of the first size.
        turn: within it the images are made.
    """
    row: dict[str, Any] = {"images": []}

    def keep(rows: list[life.Row], latents: list[Any]) -> None:
        row["images"] = rows
        torch.save(latents, file.with_suffix(".latents"))
        file.write_text(json.dumps(row), encoding="utf-8")

    began = time.perf_counter()
    try:
        device = machine.device()
        gpu = device.type == "cuda"
        if gpu:
            device = torch.device("cuda", torch.cuda.current_device())
        else:
            torch.set_num_threads(1)  # of tiny models each operation is too small to be shared
        parts = build(case.model, device, torch.float16 if gpu else torch.float32)
        if gpu:
            # they come to the small card as the host brings them
            for module in (parts.unet, parts.vae, *parts.encoders):
                torch.nn.Module.to(module, "cpu")
            machine.free_memory(device)
        with contextlib.ExitStack() as stack:
            if gpu:
                stack.enter_context(small_card(case.card))
            host = open_host(parts, device, case.mode, case.card, ours, eight_bits)
            stack.callback(host.close)
            row["ready_s"] = round(time.perf_counter() - began, 2)
            with turn():
                made = sizes(case.model)
                life.live(host, made if images is None else made[:1] * images, steps, keep)
            row |= life.told(host)
    except ImportError as exc:
        row["missing"] = f"{type(exc).__name__}: {exc}"
    except Exception as exc:
        where = "out_of_memory" if out_of_memory(exc) else "failed"
        row[where] = "loading" if not row["images"] else "the end"
        row["message"] = f"{type(exc).__name__}: {exc}"[:1000]
        row["traceback"] = traceback.format_exc()[-3000:]
    row["process_s"] = round(time.perf_counter() - began, 2)
    file.write_text(json.dumps(row), encoding="utf-8")


def in_process(case: Case, way: str, steps: int, file: Path, timeout: float) -> dict[str, Any]:
    """`one` in a process of its own; what it wrote, whatever became of it."""
    command = [sys.executable, "-m", "benchmarks.small_cards", "--one", way, "--out", str(file), "--steps", str(steps)]
    command += ["--card", f"{case.card:g}", "--model", case.model, "--mode", case.mode]
    ended: dict[str, Any] = {}
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, errors="replace")
        if done.returncode:
            ended = {"failed": f"ended with status {done.returncode}", "message": done.stderr[-1500:]}
    except subprocess.TimeoutExpired:
        ended = {"failed": f"took longer than {timeout:.0f} s"}
    except OSError as exc:
        ended = {"failed": f"did not start: {exc}"}
    found: dict[str, Any] = {"images": []}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        ended = ended or {"failed": "left no result"}
    return {**case._asdict(), "way": way, "steps": steps, **ended, **found}


def errors(stock: Path, ours: Path) -> list[float | None]:
    """How far the latents of two lives are apart, image by image; None where one has none."""
    try:
        pairs = zip(*(torch.load(file.with_suffix(".latents")) for file in (stock, ours)))
        return [None if a is None or b is None else relative_error([b], [a]) for a, b in pairs]
    except (OSError, RuntimeError, ValueError):
        return []


def earlier(file: Path, gpu: str | None) -> list[dict[str, Any]]:
    """The rows of a file that is of the same GPU."""
    if not file.exists():
        return []
    found = json.loads(file.read_text(encoding="utf-8"))
    return list(found["rows"]) if found["gpu"] == gpu else []


def joined(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of an earlier run and of this one: of each case those of this one, unless it was not measured."""

    def case(row: dict[str, Any]) -> Case:
        return Case(row["card"], row["model"], row["mode"])

    measured, there = {case(row) for row in now if "missing" not in row}, {case(row) for row in before}
    kept = [row for row in before if case(row) not in measured]
    return [*kept, *(row for row in now if "missing" not in row or case(row) not in there)]


def measure(
    cases: Sequence[Case],
    steps: int,
    minutes: float,
    result: dict[str, Any],
    file: Path,
    before: Sequence[dict[str, Any]],
) -> None:
    """Live all cases, those that come first until the time is over; the file is written after each process.

    Args:
        result: gets a row for each process.
        before: rows of an earlier run, see `joined`.
    """
    until = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="sfast-small-cards-") as folder:
        for number, case in enumerate(cases):
            files = [Path(folder, f"{number}-{way}.json") for way in WAYS]
            for turn, (way, into) in enumerate(zip(WAYS, files)):
                left = until - time.monotonic()
                share = left / (len(WAYS) * (len(cases) - number) - turn)
                if left < 15:
                    row = {**case._asdict(), "way": way, "steps": steps, "images": [], "missing": "the time was over"}
                else:
                    row = in_process(case, way, steps, into, min(max(PROCESS_S, share), left))
                if way == "ours":
                    row["errors"] = errors(*files)
                row["commit"] = result["commit"]
                result["rows"].append(row)
                written = {**result, "rows": joined(before, result["rows"])}
                records.write(file, written)
            if "missing" not in result["rows"][-1]:
                print(table.words(*result["rows"][-2:]), flush=True)


def main(given: Sequence[str] | None = None) -> int:
    """Measure; 1 where ours is out of memory, slower or different where the WebUI alone is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/small-cards-<gpu>.json")
    parser.add_argument("--card", type=float, metavar="GB", help="only this card")
    parser.add_argument("--model", choices=NAMES, help="only this model")
    parser.add_argument("--mode", choices=MODES, help=f"only this; {', '.join(A1111_MODES)} are AUTOMATIC1111's")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each image (%(default)s)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="no case begins after these (%(default)s)")
    parser.add_argument(
        "--page", type=Path, nargs="+", metavar="FILE", help="write docs/small-cards.md; measure nothing"
    )
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.page:
        table.write([json.loads(file.read_text(encoding="utf-8")) for file in args.page])
        return 0
    if args.one:
        one(Case(args.card, args.model, args.mode), args.one == "ours", args.steps, args.out)
        return 0
    asked = (args.card, args.model, args.mode)
    cases = [Case(*asked)] if all(asked) else [c for c in CASES if all(a in (None, b) for a, b in zip(asked, c))]
    here = machine.describe()
    if here["gpu"] is None and any(not case.model.startswith(TINY) for case in cases):
        print("the full models need a GPU", file=sys.stderr)
        return 1
    file = args.json or RESULTS / file_for(here["gpu"]).name.replace("unet-", "small-cards-")
    file.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {**here, "rows": []}
    measure(cases, args.steps, args.minutes, result, file, earlier(file, here["gpu"]))
    verdicts = [each for pair in table.pairs(result) for each in table.verdicts(*pair)]
    print(f"\n{table.render(result)}\n")
    for met, what in verdicts:
        print(f"{'met' if met else 'NOT met'}: {what}")
    return 0 if all(met for met, _ in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
