"""`python -m sfast_ext demo`: images with and without the accelerator, while LoRA, size and checkpoint change."""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from sfast_ext import Accelerator, Config, accelerate, eight_bits
from sfast_ext.reasons import text
from sfast_ext.runtime.verify import BUDGET
from sfast_ext.tools.lib import changes, difference_sheet, machine, models, names, pace, pipelines
from sfast_ext.tools.lib.difference_sheet import Compared, figure
from sfast_ext.tools.lib.last_call import LastCall
from sfast_ext.tools.text import number, table

PROMPTS = ("a lighthouse on a cliff, oil on canvas", "a fox in the snow, early morning")
# Mean absolute difference of an image, of 255. In half precision each step of the sampler carries on the rounding of
# the one before, and guidance multiplies it: an error of 0.002 in each call comes to 0.15 after 20 steps.
TOLERANCE = {torch.float32: 0.5, torch.float16: 2.0}
IMAGES = 9
ON_THE_SHEET = 4
"""So many of the first rows, each of another kind, are on the sheet."""
ON_A_CPU = (
    "There is no NVIDIA GPU here, so this runs on the CPU, which Stable Fast is not made for. It shows that the\n"
    "images are the same. Its times say nothing about a GPU: here an image may take longer with Stable Fast."
)


@dataclass
class Options:
    """The arguments of the command."""

    model: str | None
    out: Path
    steps: int | None
    size: tuple[int, int] | None
    json: Path | None
    verbose: bool = False
    """Show the first calls, the captures, and what plans consist of, as well."""
    faster_sums: bool = False
    eight_bits: bool = False

    @property
    def lossy(self) -> bool:
        """Whether details of the images may change. Without a GPU for 8 bits they may not, whatever was asked for."""
        return self.faster_sums or (self.eight_bits and eight_bits.refusal() is None)


@dataclass
class Row:
    """One image, made twice."""

    what: str
    size: str
    ms_before: float
    ms_after: float
    first_call_ms: float
    difference: float
    """The mean over the image, of 255."""
    largest: float
    """In one pixel, of 255."""
    error: float | None
    call_error: float
    """Of the image's last call of the UNet, relative to the original's result for the same input."""
    captures: int
    new_captures: int
    may_capture: bool
    changed: int | None = None


@dataclass
class Calls:
    """Milliseconds of each call of the UNet in one image."""

    each: list[float] = field(default_factory=list)

    @property
    def usual(self) -> float:
        """The median of all but the first."""
        return median(self.each[1:] or self.each)


def _timed(pipe: Any, calls: Calls, device: torch.device, tick: Callable[[], None]) -> ExitStack:
    # the pipeline asks the scheduler right before each call of the UNet and right after it; a hook on the UNet itself
    # would be one more thing for the accelerator to look at
    scheduler, started = pipe.scheduler, [0.0]
    before, after = scheduler.scale_model_input, scheduler.step

    @functools.wraps(before)
    def scale_model_input(*args: Any, **kwargs: Any) -> Any:
        result = before(*args, **kwargs)
        machine.synchronise(device)
        started[0] = time.perf_counter()
        return result

    @functools.wraps(after)
    def step(*args: Any, **kwargs: Any) -> Any:
        machine.synchronise(device)
        calls.each.append(1000 * (time.perf_counter() - started[0]))
        tick()
        return after(*args, **kwargs)

    stack = ExitStack()
    for name, function in (("scale_model_input", scale_model_input), ("step", step)):
        setattr(scheduler, name, function)
        stack.callback(delattr, scheduler, name)
    return stack


class Demo:
    """Two pipelines that differ in one thing: the UNet of the second has an accelerator."""

    def __init__(
        self,
        plain: Any,
        prompts: Sequence[str],
        steps: int,
        size: tuple[int, int],
        device: torch.device,
        progress: Any,
        options: Options | None = None,
    ) -> None:
        self.lossy = options is not None and options.lossy
        self.plain, self.prompts, self.steps, self.size = plain, prompts, steps, size
        self.device, self.progress = device, progress
        self.fast = copy.copy(plain)
        unet = copy.deepcopy(plain.unet)
        self.fast.register_modules(unet=unet)
        config = Config(
            allow_cpu=device.type == "cpu",
            faster_sums=options is not None and options.faster_sums,
            eight_bits=options is not None and options.eight_bits,
        )
        self.accelerator: Accelerator = accelerate(unet, config)
        self.rows: list[Row] = []
        self.compared: list[Compared] = []

    @property
    def dtype(self) -> torch.dtype:
        """What the UNets compute in."""
        return next(self.plain.unet.parameters()).dtype

    def change(self, what: Callable[[nn.Module], Any]) -> Any:
        """Do the same to both UNets."""
        what(self.plain.unet)
        return what(self.fast.unet)

    def image(
        self,
        what: str,
        *,
        prompt: int = 0,
        size: tuple[int, int] | None = None,
        may_capture: bool = False,
        changed: Any = None,
    ) -> None:
        """One image from each pipeline, and what it took."""
        self.progress.set_description(what)
        size = size or self.size
        captures = self._captures()
        with LastCall(self.plain.unet) as last:
            before, image = self._generate(self.plain, prompt, size)
        after, accelerated = self._generate(self.fast, prompt, size)
        one = Compared(f"{what}, {size[0]}x{size[1]}", image, accelerated)
        self.compared.append(one)
        self.rows.append(
            Row(
                what,
                f"{size[0]}×{size[1]}",
                before.usual,
                after.usual,
                after.each[0],
                _difference(image, accelerated),
                float(one.apart.max()),
                self._error(),
                last.error_of(self.fast.unet),
                self._captures(),
                self._captures() - captures,
                may_capture,
                changed if isinstance(changed, int) else None,
            )
        )

    def _generate(self, pipe: Any, prompt: int, size: tuple[int, int]) -> tuple[Calls, np.ndarray]:
        calls = Calls()
        with torch.inference_mode(), _timed(pipe, calls, self.device, self.progress.update):
            result = pipe(
                self.prompts[prompt],
                width=size[0],
                height=size[1],
                num_inference_steps=self.steps,
                generator=torch.Generator("cpu").manual_seed(prompt),
                output_type="np",
            )
        return calls, result.images[0]

    def _captures(self) -> int:
        return self.accelerator.report.counter("captures")

    def _error(self) -> float | None:
        errors = [plan["error"] for plan in self.accelerator.status()["plans"] if plan["error"] is not None]
        return max(errors) if errors else None


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    if not np.isfinite(a).all() or not np.isfinite(b).all():
        return float("inf")
    return float(np.abs(a.astype(np.float64) - b).mean() * 255)


def _schedule(demo: Demo) -> list[Callable[[], None]]:
    """The story, an image each."""
    width, height = demo.size
    other = (width + 64, height - 64 if height > 64 else height)
    first = {k: v.detach().cpu().clone() for k, v in demo.plain.unet.state_dict().items()}
    second = models.random_state(demo.plain.unet, seed=1000)

    def diffusers_lora() -> None:
        try:
            changed = demo.change(lambda unet: changes.lora_of_diffusers(unet, seed=3))
        except ImportError:
            demo.progress.write("diffusers' own LoRA is left out: peft is not installed")
            demo.progress.update(2 * demo.steps)
            return
        demo.image("LoRA, fused by diffusers", may_capture=True, changed=changed)

    return [
        lambda: demo.image("first image", may_capture=True),
        lambda: demo.image("another prompt", prompt=1),
        lambda: demo.image(
            "LoRA, as AUTOMATIC1111", changed=demo.change(lambda unet: changes.lora_in_place(unet, seed=1))
        ),
        lambda: demo.image("another size", size=other, may_capture=True),
        lambda: demo.image("LoRA, as SD.Next", changed=demo.change(lambda unet: changes.lora_replaced(unet, seed=2))),
        diffusers_lora,
        lambda: demo.image("the first size again"),
        lambda: demo.image(
            "another checkpoint",
            changed=demo.change(lambda unet: changes.load_checkpoint(unet, second)) or len(second),
        ),
        lambda: demo.image(
            "the first checkpoint again",
            changed=demo.change(lambda unet: changes.load_checkpoint_by_cpu(unet, first)) or len(first),
        ),
    ]


def faults(demo: Demo) -> list[str]:
    """What is not as it has to be, a sentence each."""
    tolerance = _tolerance(demo)
    found = [
        f"{row.what}: the images differ by {row.difference:.2f} of 255, more than {tolerance}"
        for row in demo.rows
        if not row.difference <= tolerance
    ]
    if demo.lossy:
        budget = BUDGET * demo.accelerator.config.tolerance
        over = [row for row in demo.rows if not row.call_error <= budget]
        found += [f"{row.what}: a call differs by {row.call_error:.2g}, more than {budget:g}" for row in over]
    found += [f"{row.what}: a new capture" for row in demo.rows if row.new_captures and not row.may_capture]
    report = demo.accelerator.report.as_dict()
    if not report["counters"].get("captures"):
        found.append("the accelerator ran no plan")
    found += [f"the original forward ran {count} times: {reason}" for reason, count in report["reasons"].items()]
    if report["last_error"]:
        found.append(f"error in {report['last_error']['stage']}: {report['last_error']['message']}")
    return found


def _tolerance(demo: Demo) -> float:
    """How far images may be apart, of 255, on average."""
    # how much details change is told in the table; that they do is what was asked for. A call has its own limit
    return 255.0 if demo.lossy else TOLERANCE.get(demo.dtype, 2.0)


def verdict(demo: Demo, found: list[str]) -> str:
    """The last line: whether the images agree, and by how much they differ at most."""
    largest, mean = (max(each) for each in zip(*((row.largest, row.difference) for row in demo.rows)))
    tolerance = _tolerance(demo)
    figures = f"largest difference {figure(largest)} of 255, on average {figure(mean)} where {tolerance} is allowed"
    agree = mean <= tolerance
    if not found and demo.lossy:
        return f"Images differ in details, as was asked for: largest difference {figure(largest)} of 255. PASS"
    if not found:
        return f"Images agree: {figures}. PASS"
    return f"Images {'agree' if agree else 'differ'}: {figures}. {len(found)} faults are listed above. FAIL"


def report(demo: Demo, verbose: bool) -> str:
    """The tables."""
    head = ("image", "size", "original", "accelerated", "difference")
    rows = [
        (row.what, row.size, f"{row.ms_before:.1f} ms", f"{row.ms_after:.1f} ms", figure(row.largest))
        for row in demo.rows
    ]
    parts = [
        table(head, rows),
        "original, accelerated: time of one step, median. difference: the largest in a pixel, of 255.",
    ]
    return "\n\n".join([*parts, *(_internals(demo) if verbose else ())])


def _internals(demo: Demo) -> list[str]:
    """What is of use to those who change Stable Fast."""
    plans = demo.accelerator.status()["plans"]
    rows = [
        (
            row.what,
            f"{row.first_call_ms:.0f} ms",
            f"{row.difference:.5f}",
            f"{row.captures} (+{row.new_captures})" if row.new_captures else str(row.captures),
        )
        for row in demo.rows
    ]
    parts = [
        table(("image", "first call", "mean difference", "captures"), rows),
        "first call: the first accelerated one after the change, with all costs of the change. captures: since the"
        " start.",
    ]
    if not plans:
        return parts
    passes = [name for name in plans[0]["fused"] if any(plan["fused"].get(name) for plan in plans)]
    fused = [(name, *(plan["fused"].get(name, 0) for plan in plans)) for name in passes]
    parts.append(table(("rewritten", *(f"plan {i + 1}" for i in range(len(plans)))), fused))
    states = [
        (
            i + 1,
            plan["state"],
            "–" if plan["error"] is None else f"{plan['error']:.1e}",
            plan["replays"],
            f"{number(plan['first_call_s'])} s",
        )
        for i, plan in enumerate(plans)
    ]
    parts.append(table(("plan", "state", "error of a call", "replays", "built in"), states))
    layers = eight_bits.lines(eight_bits.summary([demo.accelerator.status()]))
    return [*parts, "\n".join(layers)] if layers else parts


def main(options: Options) -> int:
    """Run it, print the table, write the sheet, say whether images agree; 1 if something is not as it has to be.

    Raises:
        Unavailable: the model cannot be loaded.
    """
    from tqdm import tqdm

    # before it is imported; its remarks on image processors concern nothing here
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    device = machine.device()
    dtype, steps, size = pipelines.scale(device, options.steps, options.size)
    plain, name, known = pipelines.chosen(options.model, dtype=dtype, device=device)
    where = machine.describe()["gpu"] or "the CPU"
    print(f"Stable Diffusion of {name} on {where}", flush=True)
    if device.type == "cpu":
        print(ON_A_CPU, flush=True)
        pace.few_threads(plain.unet)
    refused = eight_bits.refusal() if options.eight_bits else None
    if refused is not None:
        print(f"8 bits are not used: {text(refused)}", flush=True)
    calls = IMAGES * 2 * steps
    pace.of_images(device, plain.unet, size, calls)
    plain.set_progress_bar_config(disable=True)
    with tqdm(total=calls, unit="step", file=sys.stdout, dynamic_ncols=True, mininterval=0.5) as progress:
        demo = Demo(plain, known[3:5] if known else PROMPTS, steps, size, device, progress, options)
        for image in _schedule(demo):
            image()
    print(f"\n{report(demo, options.verbose)}\n")
    found = faults(demo)
    said = verdict(demo, found)
    options.out.mkdir(parents=True, exist_ok=True)
    title = f"Stable Fast: {name if options.model in (None, *names.ALL) else Path(name).name} on {where}"
    difference_sheet.sheet(title, demo.compared[:ON_THE_SHEET], said).save(options.out / "sheet.png")
    if options.json is not None:
        result = {**machine.describe(), "rows": [asdict(row) for row in demo.rows], "faults": found}
        options.json.write_text(
            json.dumps({**result, "accelerator": demo.accelerator.status()}, indent=1), encoding="utf-8"
        )
    demo.accelerator.release()
    for fault in found:
        print(f"FAULT {fault}")
    print(f"{options.out / 'sheet.png'} shows original, accelerated and difference next to each other.")
    print(said)
    return 1 if found else 0
