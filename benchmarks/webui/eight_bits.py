"""SDXL in a real WebUI on an emulated card: its UNet in 8 bits, and as it is accelerated today; a larger card next to
them.

    SFAST_A1111_DIR=... python -m benchmarks.webui.eight_bits --card 6 --card 8 --json FILE

All WebUIs start at once, and make their images in turns. A step is what an image of half as many steps again takes in
addition. A WebUI that fails makes no further image; the others do. With --brief the images that are not timed are made
at once, and none of half as many steps again: neither the first image nor a step has a time then.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import records
from benchmarks.webui import breakdown
from benchmarks.webui.hosts import HOSTS, LARGE, run
from benchmarks.webui.images import numbered, payload_of, taken, taken_apart, turn
from sfast_ext import cli
from sfast_ext.tools.lib import machine


class Case(NamedTuple):
    """A card, and how its WebUI makes images."""

    card: float
    way: str
    flags: str

    def __str__(self) -> str:
        return f"{self.card:g} GB, {self.flags or 'no flag'}, {self.way}"


UNTIMED = 2
"""Images that are not timed: the second one makes the first plan of a model."""
SDP = "--opt-sdp-attention"
"""Of AUTOMATIC1111: SDXL at 1024x1024 runs out of 6 GB with the attention that it takes by itself."""
FLAGS = {
    "a1111": {6: (f"--medvram {SDP}", f"--medvram {SDP}"), 8: (f"--medvram-sdxl {SDP}", SDP)},
    "sdnext": {6: ("", ""), 8: ("", "")},
    "forge-neo": {6: ("", ""), 8: ("", "")},
    "forge": {6: ("", ""), 8: ("", "")},
    "reforge": {6: ("", ""), 8: ("", "")},
}
"""Of each card: as it is used today, and with 8 bits."""
LARGER, FLAGS_OF_LARGER = 12.0, {"a1111": SDP}


def cases_of(
    host: str, cards: list[int], stock: bool = False, earlier: bool = False, larger: bool = True
) -> list[Case]:
    """The larger card, and of each card both; if asked for, what the WebUI alone and an earlier state of the extension
    do with today's flags as well."""
    found = [Case(LARGER, "extended", FLAGS_OF_LARGER.get(host, ""))] * larger
    for card in cards:
        today, eight = FLAGS[host][card]
        found += [Case(card, "extended", today), Case(card, "eight", eight)]
        found += [Case(card, "stock", today)] * stock + [Case(card, "earlier", today)] * earlier
    return found


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A row for each case; the file that the options name is written after each turn."""
    host = HOSTS[options.host](folder, options)
    width, height = options.size
    cases = cases_of(options.host, options.cards, options.stock, bool(options.earlier), options.larger)
    rows: dict[Case, dict[str, Any]] = {each: {"case": str(each), **each._asdict()} for each in cases}
    found = {**machine.describe(), "host": options.host, "model": options.model, "weights": "random"}
    found |= {"size": f"{width}x{height}", "steps": options.steps, "rows": list(rows.values())}
    webuis = {}
    for number, each in enumerate(cases):
        webuis[each] = host.start(each.way, number, each.flags)
        webuis[each].env["SFAST_CARD_GIB"] = str(0 if options.tiny else each.card)

    def begin(case: Case) -> None:
        try:
            host.ready(webuis[case].__enter__())
            webuis[case].post("/sfast-probe/count", {})
            webuis[case].post("/sfast-probe/memory", {})
        except (OSError, RuntimeError) as error:
            failed(case, error)

    def failed(case: Case, error: Exception) -> None:
        rows[case]["failed"] = str(error)[:400]
        rows[case]["log"] = str(error)[-2500:]
        print(f"{case}: {str(error)[:400]}", flush=True)

    def make(case: Case, seed: int, steps: int, name: str) -> None:
        if "failed" in rows[case] or (case.way == "stock" and (seed > 1 or name == "longer_s")):
            return
        try:
            request = numbered({**payload, "steps": steps}, "txt2img", seed, options)
            rows[case].setdefault(name, []).append(round(taken(webuis[case], "txt2img", request)[0], 3))
            if name == "images_s":
                rows[case].setdefault("memory", []).append(webuis[case].post("/sfast-probe/memory", {}))
        except (OSError, RuntimeError) as error:
            failed(case, error)

    def make_untimed(case: Case) -> None:
        for seed in range(UNTIMED):
            make(case, seed, options.steps, "images_s")

    payload = payload_of(host, "txt2img", width, height, options)
    with contextlib.ExitStack() as stack:
        for webui in webuis.values():
            stack.push(webui)
        with ThreadPoolExecutor() as pool:
            list(pool.map(begin, cases))
            if options.brief:
                list(pool.map(make_untimed, cases))
        stack.enter_context(turn(options.turn))
        kinds = {"images_s": options.steps} | ({} if options.brief else {"longer_s": options.steps * 3 // 2})
        for seed in range(UNTIMED if options.brief else 0, options.images + UNTIMED):
            for name, steps in kinds.items():
                for case in cases:
                    if seed >= UNTIMED or name != "longer_s":
                        make(case, seed, steps, name)
            if options.json:
                records.write(options.json, found)
        for case in cases:
            end(webuis[case], rows[case], options)
            print(words(case, rows), flush=True)
            if options.breakdown and "failed" not in rows[case]:
                apart = rows[case]["breakdown"] = taken_apart(webuis[case], "txt2img", payload, options)
                print(*breakdown.lines(str(case), apart), sep="\n", flush=True)
    if options.json:
        records.write(options.json, found)
    return found


def end(webui: Any, row: dict[str, Any], options: argparse.Namespace) -> None:
    """Add the figures of a case, as far as it came."""
    times, steps = row.get("images_s", []), options.steps
    if len(times) > UNTIMED:
        row["image_s"] = statistics.median(times[UNTIMED:])
        row |= {} if options.brief else {"first_s": times[0]}
    if len(times) > UNTIMED and row.get("longer_s"):
        longer = statistics.median(row["longer_s"])
        row["step_ms"] = round(1000 * (longer - row["image_s"]) / (steps * 3 // 2 - steps), 1)
    with contextlib.suppress(OSError, RuntimeError):  # the WebUI alone has no such route
        status = webui.get("/sfast/v1/status")
        row |= {"reasons": status["reasons_since_start"], "last_error": status["last_error"]}
        row["counters"] = status["counters"]


def words(case: Case, rows: dict[Case, dict[str, Any]]) -> str:
    """What came of a case, in a line."""
    row = rows[case]
    told = [f"{case}: step {row.get('step_ms')} ms, image {row.get('image_s')} s, first {row.get('first_s')} s"]
    for memory in row.get("memory", [])[-1:]:
        told.append(f"reserved {memory['bytes'] >> 20} MB, the UNet's weights {memory['unet'] >> 20} MB")
    larger = next((row for each, row in rows.items() if each.card == LARGER), {})
    if "step_ms" in row and larger.get("step_ms"):
        told.append(f"step {row['step_ms'] / larger['step_ms']:.2f} of {LARGER:g} GB")
    today = next((rows[each] for each in rows if each.card == case.card and each.way == "extended"), {})
    if "image_s" in row and "image_s" in today:
        told.append(f"image {row['image_s'] / today['image_s']:.2f} of today's")
    earlier = next((rows[each] for each in rows if each.card == case.card and each.way == "earlier"), {})
    if "image_s" in row and "image_s" in earlier and row is not earlier:
        told.append(f"{row['image_s'] / earlier['image_s']:.2f} of the earlier state's")
    told.append(f"{row.get('reasons')}, {row.get('last_error')}")
    return "; ".join(told)


def main() -> int:
    """Print the numbers, and write them if asked for; 1 if any case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", choices=sorted(FLAGS), default="a1111", help="the WebUI (%(default)s)")
    parser.add_argument("--model", choices=sorted(LARGE), default="sdxl", help="its size (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and no card instead, to try this out")
    parser.add_argument("--card", type=int, choices=(6, 8), action="append", dest="cards", help="GB (both)")
    parser.add_argument("--size", type=cli.size, default=(1024, 1024), metavar="WxH", help="of images (1024x1024)")
    parser.add_argument("--steps", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--images", type=int, default=3, help="timed, after two (%(default)s)")
    parser.add_argument("--larger", action=argparse.BooleanOptionalAction, default=True, help="the larger card as well")
    parser.add_argument("--brief", action="store_true", help="times of images alone")
    parser.add_argument("--breakdown", type=int, default=0, metavar="N", help="of N further images (none)")
    parser.add_argument("--stock", action="store_true", help="the WebUI alone as well, two images of each card")
    parser.add_argument("--earlier", type=Path, metavar="DIR", help="an earlier checkout as well (not SD.Next)")
    parser.add_argument("--turn", metavar="DIR,N,ALL", help="see benchmarks.webui")
    parser.add_argument("--models", type=Path, metavar="DIR", help="where models of random weights stay (nowhere)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    options = parser.parse_args()
    options.cards = options.cards or [6, 8]
    options.checkpoint, options.vae_plans_at_once, options.batch, options.another_prompt = None, False, 1, True
    options.card = LARGER
    found = run(options, measure)
    return int(any("failed" in row or row.get("last_error") for row in found["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())
