"""SDXL on cards of 6, 8 and 12 GB, as it is accelerated without 8 bits and with them.

    python -m benchmarks.small_cards.resident                    # SDXL, images of 20 steps, on a GPU
    python -m benchmarks.small_cards.resident --model tiny-sdxl --steps 2       # on a CPU, to try it

All cases start at once, each in a process, and make their images one after another, so that no other has the GPU at
that time. Of each: a step and an image, the first image, the peak of reserved memory, and what the UNet's weights have
of the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.small_cards import table
from benchmarks.small_cards.run import ROOT, Case, errors, one

PICTURES, STARTING_S, LIMIT_S = 2, 30.0, 100.0


class Way(NamedTuple):
    """A card, the flag of the WebUI, and whether 8 bits are on."""

    card: float
    mode: str
    eight_bits: bool

    def __str__(self) -> str:
        return f"{self.card:g} GB, {self.mode}, {'8 bits' if self.eight_bits else 'half precision'}"


WAYS = [
    Way(12, "none", False),
    Way(6, "medvram", True),
    Way(6, "medvram", False),
    Way(8, "none", True),
    Way(8, "medvram-sdxl", False),
    Way(8, "medvram-sdxl", True),
    Way(12, "none", True),
]
"""What matters most comes first: the time may be over before the last."""


@contextlib.contextmanager
def in_turn(folder: Path, number: int, others: int) -> Iterator[None]:
    """Wait until all are ready and those before this one are done."""
    (folder / f"{number}.ready").touch()
    until = time.monotonic() + STARTING_S
    while len(list(folder.glob("*.ready"))) < others and time.monotonic() < until:
        time.sleep(0.1)
    # those before come first if they are ready
    time.sleep(0.05 * number)
    with open(folder / "turn", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


def measure(model: str, ways: Sequence[Way], steps: int, file: Path | None) -> list[dict[str, Any]]:
    """The rows of all ways, each as far as it came."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sfast-resident-") as name:
        folder = Path(name)
        running = []
        for number, way in enumerate(ways):
            command = [sys.executable, "-m", "benchmarks.small_cards.resident", "--one", str(number), str(len(ways))]
            command += ["--model", model, "--steps", str(steps), "--out", name, "--way", json.dumps(way)]
            running.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True))
        rows = []
        for number, (way, process) in enumerate(zip(ways, running)):
            row: dict[str, Any] = {"pictures": []}
            try:
                _, said = process.communicate(timeout=max(1.0, LIMIT_S - (time.monotonic() - began)))
                if process.returncode:
                    row["failed"] = said[-1500:]
            except subprocess.TimeoutExpired:
                process.kill()
                row["failed"] = "the time was over"
            with contextlib.suppress(OSError, ValueError):
                row |= json.loads((folder / f"{number}.json").read_text(encoding="utf-8"))
            row |= {"card": way.card, "model": model, "mode": way.mode, "way": str(way)}
            rows.append(row)
            print(words(row), flush=True)
            if file is not None:
                file.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        exact = next((i for i, way in enumerate(ways) if not way.eight_bits), None)
        for number, row in enumerate(rows if exact is not None else ()):
            row["errors"] = errors(folder / f"{exact}.json", folder / f"{number}.json")
            print(f"{row['way']}: latents {row['errors']} from those of {ways[exact or 0]}", flush=True)
    return rows


def words(row: dict[str, Any]) -> str:
    """What came of a way, in a line or two."""
    pictures = row["pictures"]
    first = pictures[0] if pictures else {}
    said = f"{row['way']}: a step {table.mean(row, 'step_ms')} ms, an image {table.mean(row, 'seconds')} s"
    said += f", the first {first.get('seconds')} s, reserved {[p.get('reserved_mb') for p in pictures]} MB"
    said += f", the UNet {[p.get('unet_mb') for p in pictures]} MB, parts {first.get('prompt_s')}"
    said += f" {[p.get('vae_s') for p in pictures]} s"
    counted = pictures[-1].get("counted") if pictures else None
    rest = {key: row.get(key) for key in ("failed", "out_of_memory", "message", "reasons", "last_error", "events")}
    failed = [p.get("out_of_memory") or p.get("failed") for p in pictures]
    return f"{said}\n    {counted} {failed} {({key: value for key, value in rest.items() if value})}"


def main(given: Sequence[str] | None = None) -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sdxl")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ways", type=int, default=len(WAYS), help="only the first ones")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the rows are written")
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--way", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.one:
        (number, others), way = args.one, Way(*args.way)
        file = args.out / f"{number}.json"

        def turn() -> contextlib.AbstractContextManager[None]:
            return in_turn(args.out, number, others)

        one(Case(way.card, args.model, way.mode), True, args.steps, file, way.eight_bits, PICTURES, turn)
        return 0
    measure(args.model, WAYS[: args.ways], args.steps, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
