"""SDXL on cards of 6, 8 and 12 GB, as it is accelerated without 8 bits and with them.

    python -m benchmarks.small_cards.resident                    # SDXL, images of 20 steps, on a GPU
    python -m benchmarks.small_cards.resident --model tiny-sdxl --steps 2       # on a CPU, to try it

All cases start at once, each in a process, and make their images one after another, in the order in which they are
ready. So no other has the GPU at that time, and the first ones load while one makes its first image. A case is printed
as soon as it is done. Of each: a step and an image, the first image, the parts of the last one, the peaks of reserved
and of allocated memory, and what the UNet's weights have of the GPU; then what is asked of them.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.small_cards.run import ROOT, Case, errors, one
from sfast_ext.eight_bits import SDXL_BYTES

IMAGES, SECONDS = 3, 100.0
HALF_MB = SDXL_BYTES / 2**20
"""Of SDXL's UNet in half precision."""


class Way(NamedTuple):
    """A card, the flag of the WebUI, and whether 8 bits are on."""

    card: float
    mode: str
    eight_bits: bool

    def __str__(self) -> str:
        return f"{self.card:g} GB, {self.mode}, {'8 bits' if self.eight_bits else 'half precision'}"


WAYS = [
    Way(6, "medvram", True),
    Way(8, "none", True),
    Way(6, "medvram", False),
    Way(12, "none", False),
    Way(8, "medvram-sdxl", False),
    Way(8, "medvram-sdxl", True),
    Way(12, "none", True),
]
"""What matters most comes first: the time may be over before the last."""
SMALL, LARGE, TODAY6, TODAY8 = WAYS[0], WAYS[3], WAYS[2], WAYS[4]


@contextlib.contextmanager
def in_turn(folder: Path, number: int) -> Iterator[None]:
    """Wait until no other makes images."""
    # those before come first if they are ready at once
    time.sleep(0.5 * number)
    with open(folder / "turn", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


def measure(
    model: str, ways: Sequence[Way], steps: int, file: Path | None, seconds: float = SECONDS
) -> list[dict[str, Any]]:
    """The rows of all ways, each as far as it came."""
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="sfast-resident-") as name:
        folder = Path(name)
        running: dict[int, subprocess.Popen[bytes]] = {}
        for number, way in enumerate(ways):
            command = [sys.executable, "-m", "benchmarks.small_cards.resident", "--one", str(number)]
            command += ["--model", model, "--steps", str(steps), "--out", name, "--way", json.dumps(way)]
            with open(folder / f"{number}.said", "wb") as said:
                running[number] = subprocess.Popen(command, cwd=ROOT, stderr=said)
        rows: dict[int, dict[str, Any]] = {}
        while running:
            time.sleep(0.2)
            late = time.monotonic() > until
            for number in [n for n, process in running.items() if late or process.poll() is not None]:
                process = running.pop(number)
                rows[number] = ended(folder, number, process, model, ways[number])
                print(words(rows[number]), flush=True)
                if file is not None:
                    file.write_text(json.dumps(list(rows.values()), indent=1), encoding="utf-8")
        exact = next((i for i, way in enumerate(ways) if not way.eight_bits), None)
        for number, row in sorted(rows.items()) if exact is not None else ():
            row["errors"] = errors(folder / f"{exact}.json", folder / f"{number}.json")
            print(f"{row['way']}: latents {row['errors']} from those of {ways[exact or 0]}", flush=True)
    print(*asked({row["way"]: row for row in rows.values()}), sep="\n", flush=True)
    return [rows[number] for number in sorted(rows)]


def ended(folder: Path, number: int, process: subprocess.Popen[bytes], model: str, way: Way) -> dict[str, Any]:
    """The row of a way whose process is done, or is ended: the time is over."""
    row: dict[str, Any] = {"images": []}
    if process.poll() is None:
        process.kill()
        process.wait()
        row["failed"] = "the time was over"
    elif process.returncode:
        row["failed"] = (folder / f"{number}.said").read_text(encoding="utf-8", errors="replace")[-1500:]
    with contextlib.suppress(OSError, ValueError):
        row |= json.loads((folder / f"{number}.json").read_text(encoding="utf-8"))
    return row | {"card": way.card, "model": model, "mode": way.mode, "way": str(way)}


def asked(rows: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """What is asked of these ways, and what was measured."""
    for what, way, key, other, most in (
        ("6 GB, a step next to 12 GB's", SMALL, "step_ms", LARGE, 1.25),
        ("6 GB, an image next to today's", SMALL, "seconds", TODAY6, 0.5),
        ("8 GB, an image next to today's --medvram-sdxl", WAYS[1], "seconds", TODAY8, 0.6),
    ):
        ours, theirs = (last(rows.get(str(each)), key) for each in (way, other))
        if ours is not None and theirs:
            yield f"{what}: {ours / theirs:.2f} (at most {most})"
    for way in (SMALL, WAYS[1]):
        row = rows.get(str(way))
        reserved, unet = last(row, "reserved_mb"), last(row, "unet_mb")
        if reserved is not None and unet is not None:
            yield f"{way}: reserved {reserved / 1024:.2f} GiB (at most 5.5 on 8 GB)"
            yield f"{way}: the UNet {unet / HALF_MB:.3f} of half precision (at most 0.55)"


def last(row: dict[str, Any] | None, key: str) -> float | None:
    """A figure of the last image of a way that made all of them."""
    images = (row or {}).get("images", [])
    return images[-1].get(key) if len(images) == IMAGES else None


def words(row: dict[str, Any]) -> str:
    """What came of a way, in a line or two."""
    images = row["images"]
    last_one = images[-1] if images else {}
    said = f"{row['way']}: steps of {[p.get('step_ms') for p in images]} ms"
    said += f", the first ones {[p.get('first_step_ms') for p in images]}"
    said += f", images of {[p.get('seconds') for p in images]} s, reserved {[p.get('reserved_mb') for p in images]}"
    said += f" MB, the UNet {[p.get('unet_mb') for p in images]} MB, of the last one {last_one.get('parts_s')} s"
    said += f", peaks {last_one.get('peaks_mb')}"
    counted = images[-1].get("counted") if images else None
    rest = {key: row.get(key) for key in ("failed", "out_of_memory", "message", "reasons", "last_error", "events")}
    failed = [p.get("out_of_memory") or p.get("failed") for p in images]
    return f"{said}\n    {counted} {failed} {({key: value for key, value in rest.items() if value})}"


def main(given: Sequence[str] | None = None) -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sdxl")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ways", type=int, default=len(WAYS), help="only the first ones")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the rows are written")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="what is not done then is ended (%(default)s)")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--way", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.one is not None:
        way, file = Way(*args.way), args.out / f"{args.one}.json"

        def turn() -> contextlib.AbstractContextManager[None]:
            return in_turn(args.out, args.one)

        one(Case(way.card, args.model, way.mode), True, args.steps, file, way.eight_bits, IMAGES, turn)
        return 0
    measure(args.model, WAYS[: args.ways], args.steps, args.json, args.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
