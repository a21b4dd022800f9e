"""Random events in a real WebUI: `python -m hosts.live.random_events --host a1111 --events 1500 --seed 0`.

Patches as third parties write them are laid and taken away at random steps of images, first in the stock WebUI, then
in one with the extension. Each image must be the same, no more plans captured than the model had behaviours, and
plans must run again when all patches are gone. What fails is played again by the command that it names.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks import records

from . import random_sites as sites
from .random_sequences import CALM, Image, each_alone, sequence, storm_bound, storm_bound_of_all

EACH = 100
"""Events of one seed."""
TOLERANCE = 0.1
"""Of 255, mean over an image; both sides compute in fp32 and differ by the order of additions only, by a hundredth of
it. A patch that is missed at one step of several may show no more than this."""
COUNTERS = ("captures", "graph_captures", "evictions", "replays", "eager_runs", "fallbacks", "errors")
HERE = Path(__file__).resolve().parent
ALL = slice(None)
ALONE = -1
"""In the place of a seed: each kind of patch by itself."""


def tolerance(host: str) -> float:
    """How far images may be apart, of 255: on a GPU, where both sides round more coarsely, as in the other tests."""
    from . import a1111, sdnext

    module = a1111 if host == "a1111" else sdnext
    return TOLERANCE if module.ON_CPU else module.TOLERANCE


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="hosts.live.random_events", description=__doc__)
    parser.add_argument("--host", choices=("a1111", "sdnext"), default="a1111")
    parser.add_argument("--events", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0, help=f"of the first {EACH} events; the next have the next")
    parser.add_argument("--images", metavar="FIRST:END", help="of each seed, these and no others")
    parser.add_argument("--kinds", help="of patches, with commas between; default: all that there are for the host")
    parser.add_argument("--each", action="store_true", help="each kind of patch by itself, nothing at random")
    parser.add_argument("--after", action="store_true", help="their callbacks come after ours")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(given)
    options.kinds = options.kinds.split(",") if options.kinds else sites.kinds(options.host)
    unknown = set(options.kinds) - set(sites.kinds(options.host))
    if unknown:
        parser.error(f"no kinds of {options.host}'s: {', '.join(sorted(unknown))}")
    return options


@dataclass
class Plan:
    """The images of one seed."""

    seed: int
    events: int
    images: list[Image]
    settings: dict[str, Any] = field(default_factory=dict)


def planned(options: argparse.Namespace) -> list[Plan]:
    """What is to be played."""
    first, _, end = (options.images or ":").partition(":")
    chosen = slice(int(first) if first else None, int(end) if end else None)
    if options.each:
        return [alone(options, chosen)]
    plans = []
    for seed, start in enumerate(range(0, options.events, EACH), options.seed):
        events = min(EACH, options.events - start)
        images = sequence(seed, events, options.host, options.kinds)[chosen]
        plans.append(Plan(seed, events, images, attention_of(options.host, seed)))
    return plans


def alone(options: argparse.Namespace, chosen: slice = ALL, *, short: bool = False) -> Plan:
    """Each kind of patch by itself; see `each_alone`."""
    images = each_alone(options.host, options.kinds, short=short)[chosen]
    return Plan(ALONE, 0, images, attention_of(options.host, 0))


def attention_of(host: str, seed: int) -> dict[str, Any]:
    """AUTOMATIC1111's attentions read different attributes: one of two for each seed."""
    names = ("sdp - scaled dot product", "InvokeAI")
    return {"cross_attention_optimization": names[seed % 2]} if host == "a1111" else {}


class Host(Protocol):
    """A WebUI that can be started."""

    def start(self, *, extension: bool) -> Any:
        """A `WebUI`, with the extension or without."""

    def ready(self, webui: Any) -> None:
        """Wait until it can make images."""


class A1111:
    """AUTOMATIC1111's WebUI."""

    def __init__(self, folder: Path, after: bool) -> None:
        from . import a1111

        self.module = a1111
        models, data = folder / "models", folder / "data"
        data.mkdir()
        a1111.make_models(models)
        self.data = a1111.make_data(data, models)
        add_patches(self.data, after)

    def start(self, *, extension: bool) -> Any:
        settings = {"sfast_allow_cpu": True} if extension else {"disabled_extensions": ["stable-fast"]}
        return self.module.start(self.data, "with" if extension else "without", settings)

    def ready(self, webui: Any) -> None:
        pass


class SDNext:
    """SD.Next."""

    def __init__(self, folder: Path, after: bool) -> None:
        from . import sdnext

        self.module, self.data = sdnext, folder / "data"
        self.data.mkdir()
        sdnext.make_models(folder / "models")
        (self.data / "models").symlink_to(folder / "models", target_is_directory=True)
        add_patches(self.data, after)

    def start(self, *, extension: bool) -> Any:
        # by default it answers sixty images a minute and no more
        return self.module.start(self.data, {"server_rate_limit": 0}, extension=extension)

    def ready(self, webui: Any) -> None:
        self.module.model_loaded(webui)


def add_patches(data: Path, after: bool) -> None:
    """The extension that lays patches; hosts call extensions in the order of their names."""
    scripts = data / "extensions" / ("zz-random-patches" if after else "random-patches") / "scripts"
    (scripts / "texts").mkdir(parents=True)
    shutil.copy(HERE / "random_patches.py", scripts)
    shutil.copy(HERE / "random_sites.py", scripts / "texts")


HOSTS: dict[str, type[A1111] | type[SDNext]] = {"a1111": A1111, "sdnext": SDNext}
Shown = dict[tuple[int, int], Any]
"""By seed and number of the image."""


class Events:
    """What was played in a WebUI without the extension and in one with it, and what came of it."""

    def __init__(self, options: argparse.Namespace, plans: list[Plan]) -> None:
        self.options, self.plans = options, plans
        self.stock: Shown = {}
        """The images without the extension."""
        self.faults: list[str] = []
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.differences: dict[tuple[int, int], float] = {}
        self.captures: dict[tuple[int, int], int] = {}
        self.parts: dict[tuple[int, int], int] = {}
        self.seconds: dict[str, float] = {}
        self.described: dict[str, Any] = {}
        self.failed: dict[int, tuple[int, str]] = {}
        """Seeds whose image the WebUI without the extension could not make: its number, and what it said."""

    def play(self, host: Host) -> None:
        """All of it, in both."""
        self.stock, _ = self.run(host, extension=False)
        ours, reports = self.run(host, extension=True)
        for plan in self.plans:
            self._judge(plan, ours, reports)

    def run(self, host: Host, *, extension: bool) -> tuple[Shown, Shown]:
        """The images, and the status after each. Each seed has a WebUI of its own: some patches leave something."""
        which = "with" if extension else "without"
        began, images, reports = time.perf_counter(), {}, {}
        for plan in self.plans:
            with host.start(extension=extension) as webui:
                host.ready(webui)
                if extension:
                    reports[plan.seed, -1] = webui.get("/sfast/v1/status")
                number = -1
                try:
                    for number, image in self._images(webui, plan):
                        images[plan.seed, number] = image
                        if extension:
                            reports[plan.seed, number] = webui.get("/sfast/v1/status")
                except (OSError, RuntimeError) as exc:
                    self._failure(plan, number + 1, exc, extension=extension, log=webui.tail())
                print(f"\r{which} the extension, seed {plan.seed}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        self.seconds[which] = round(time.perf_counter() - began, 1)
        return images, reports

    def _failure(self, plan: Plan, number: int, exc: Exception, *, extension: bool, log: str) -> None:
        """An image that could not be made: no fault if both say the same, as of values that are no numbers."""
        words = str(exc).partition("\n")[0]
        if not extension:
            self.failed[plan.seed] = number, words
        elif self.failed.get(plan.seed) != (number, words):
            self._fault(plan, number, f"the WebUI with the extension failed: {words}; its log: {log[-1500:]}")

    def _images(self, webui: Any, plan: Plan) -> Iterator[tuple[int, str]]:
        if plan.settings:
            webui.post("/sdapi/v1/options", plan.settings)
        for number, image in enumerate(plan.images):
            webui.post("/test/v1/events", image.told())
            yield number, webui.post("/sdapi/v1/txt2img", self._payload(image))["images"][0]
            told = webui.post("/test/v1/events", {"events": []})
            steps = [step for step in told["steps"] if step < image.steps]
            if told["failed"] or told["left"] or steps != list(range(image.steps)):
                self._fault(plan, number, f"the events were not played as told: {told}")

    def _payload(self, image: Image) -> dict[str, Any]:
        return {
            "prompt": "a dog on a hill", "negative_prompt": "a cat", "seed": image.seed, "steps": image.steps,
            "width": image.width, "height": image.height, "cfg_scale": 6, "save_images": False,
            **({"sampler_name": "Euler"} if self.options.host == "a1111" else {}),
        }  # fmt: skip

    def _judge(self, plan: Plan, ours: Shown, reports: Shown) -> None:
        from .webui import difference

        for number in range(len(plan.images)):
            key = (plan.seed, number)
            if key not in self.stock or key not in ours or key not in reports:
                if plan.seed not in self.failed:
                    self._fault(plan, number, "the image was not made")
                continue
            self.counts["images"] += 1
            apart = self.differences[key] = difference(ours[key], self.stock[key])
            if not apart < tolerance(self.options.host):
                self._fault(plan, number, f"the image is {apart:.2f} of 255 from the stock WebUI's")
            self._judge_report(plan, number, reports[plan.seed, number - 1], reports[key])
        first, last = reports.get((plan.seed, -1)), reports.get((plan.seed, len(plan.images) - 1))
        if first is None or last is None:
            return
        self.described = {name: last[name] for name in ("version", "host", "environment")}
        gained = _gained(first, last)
        self.counts.update(gained)
        self.reasons.update(_reasons(first, last))
        parts = [self.parts.get((plan.seed, number), 0) for number in range(len(plan.images))]
        bound = storm_bound_of_all(plan.images, parts)
        if gained["captures"] > bound:
            self._fault(plan, None, f"a capture storm: {gained['captures']} captures, at most {bound} are allowed")

    def _judge_report(self, plan: Plan, number: int, was: dict[str, Any], now: dict[str, Any]) -> None:
        image, gained = plan.images[number], _gained(was, now)
        captures = self.captures[plan.seed, number] = gained["captures"]
        parts = self.parts[plan.seed, number] = _parts(was, now)
        if captures > storm_bound(image, parts):
            had = f"{image.behaviours()} behaviours of the model and {parts} of its parts"
            self._fault(plan, number, f"a capture storm: {captures} captures for {had}")
        if now["last_error"] is not None and now["last_error"] != was["last_error"]:
            self._fault(plan, number, f"an error of ours: {now['last_error']}")
        if image.calm >= CALM and not gained["eager_runs"] + gained["replays"]:
            self._fault(plan, number, f"no plan ran although all patches are gone, because of {_reasons(was, now)}")

    def _fault(self, plan: Plan, number: int | None, words: str) -> None:
        where = f"seed {plan.seed}"
        if number is not None:
            image = plan.images[number]
            where += f", image {number}"
            words += f"; laid before: {[event.words() for event in image.before]}"
            words += f"; events: {[event.words() for event in image.events]}"
        self.faults.append(f"{where}: {words}; again: {self.again(plan)}")

    def again(self, plan: Plan) -> str:
        """The command that plays a seed again; what earlier ones left in the process is not in it."""
        told = f"python -m hosts.live.random_events --host {self.options.host} "
        told += "--each" if plan.seed == ALONE else f"--seed {plan.seed} --events {plan.events}"
        if self.options.kinds != sites.kinds(self.options.host):
            told += f" --kinds '{','.join(self.options.kinds)}'"
        if self.options.images:
            told += f" --images {self.options.images}"
        return told + (" --after" if self.options.after else "")

    def result(self) -> dict[str, Any]:
        """What JSON says of it."""
        made = [p for plan in self.plans for n, p in enumerate(plan.images) if (plan.seed, n) in self.differences]
        events = [event for image in made for event in image.events]
        worst = max(self.differences, key=lambda key: self.differences[key], default=None)
        return {
            **self.described,
            "seeds": {"first": self.plans[0].seed, "last": self.plans[-1].seed},
            "events": len(events),
            "calm_images": sum(image.calm > 0 for image in made),
            **{name: self.counts[name] for name in ("images", *COUNTERS)},
            "most_captures_in_an_image": max(self.captures.values(), default=0),
            "worst_difference": self.differences.get(worst) if worst else None,
            "worst_image": worst,
            "seconds": self.seconds,
            "failed_without_the_extension_too": {str(seed): words for seed, (_, words) in self.failed.items()},
            "events_by_kind": dict(sorted(Counter(f"{event.kind}: {event.op}" for event in events).items())),
            "events_by_keep": dict(sorted(Counter(event.keep for event in events).items())),
            "events_by_home": dict(sorted(Counter(event.home for event in events).items())),
            "reasons": dict(self.reasons.most_common()),
            "faults": self.faults,
        }


def _gained(was: dict[str, Any], now: dict[str, Any]) -> Counter[str]:
    return Counter({name: now["counters"].get(name, 0) - was["counters"].get(name, 0) for name in COUNTERS})


def _reasons(was: dict[str, Any], now: dict[str, Any]) -> dict[str, int]:
    before, after = was["reasons_since_start"], now["reasons_since_start"]
    return {why: n - before.get(why, 0) for why, n in after.items() if n > before.get(why, 0)}


def _parts(was: dict[str, Any], now: dict[str, Any]) -> int:
    """How many parts were called that are accelerated one by one."""
    calls = [
        {part["name"]: part["calls"] for each in report["accelerators"] for part in each.get("parts", ())}
        for report in (was, now)
    ]
    return sum(n != calls[0].get(name, 0) for name, n in calls[1].items())


def main(given: Sequence[str] | None = None) -> int:
    """Play events and say what came of it; 1 if something failed."""
    options = arguments(given)
    played = Events(options, planned(options))
    with tempfile.TemporaryDirectory() as folder:
        played.play(HOSTS[options.host](Path(folder), options.after))
    result = played.result()
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        records.write(options.json, result)
    long = ("events_by_kind", "events_by_keep", "events_by_home", "environment")
    print(json.dumps({name: value for name, value in result.items() if name not in long}, indent=1))
    return 1 if played.faults else 0


if __name__ == "__main__":
    sys.exit(main())
