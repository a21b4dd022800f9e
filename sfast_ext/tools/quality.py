"""`python -m sfast_ext quality`: by how much images differ with the accelerator, next to a yardstick.

The yardstick is the difference that the model shows by itself between two settings of a WebUI that nobody would call
wrong: the attentions "sdp" and `--yardstick`, on the same seeds. It rounds differently in its attention alone, the
accelerator everywhere. So `--exact` also makes the images in float32, and asks who is nearer to them.

Sums in half precision and 8 bits are compared as well, on a machine that has them. How much they change is no fault: a
user chooses them.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from sfast_ext import Accelerator, Config, accelerate, eight_bits, environment
from sfast_ext.tools.lib import Unavailable, attentions, contact_sheet, machine, pace, pipelines
from sfast_ext.tools.lib.exact import without_tf32
from sfast_ext.tools.lib.likeness import Likeness, likeness, missing
from sfast_ext.tools.text import number, table

PROMPTS = (
    "a lighthouse on a cliff, oil on canvas",
    "a fox in the snow, early morning",
    "portrait of an old sailor, 35 mm photograph",
    "a bowl of fruit on a wooden table, still life",
)
UNET, VAE = "UNet", "VAE"
UNSEEN_DB = 60.0
"""PSNR from which a difference is less than what rounding to 8 bits makes (58.9 dB)."""
MARGIN_DB = 3.0
"""By which the median of a few images may be worse than the yardstick's: twice the mean squared error."""
_MEASURES = (("psnr", 1), ("ssim", 5), ("lpips", 5))  # and decimals
LOSSY = {"faster_sums": "half-precision sums", "eight_bits": "8 bits"}
"""Fields of `Config` that change details, in words."""
_WARM_UP = 2  # images: the VAE's plan is made at the second


@dataclass
class Options:
    """The arguments of the command."""

    model: str | None
    out: Path
    images: int
    steps: int | None
    size: tuple[int, int] | None
    prompts: Path | None
    yardstick: str
    exact: bool
    lossy: bool
    """Whether sums in half precision and 8 bits are compared as well."""
    json: Path | None


@dataclass
class Row:
    """One seed."""

    seed: int
    prompt: str
    accelerated: Likeness
    yardstick: Likeness
    exact: tuple[Likeness, Likeness] | None = None
    """Of the original and the accelerated image to one in float32."""
    lossy: dict[str, Likeness] = field(default_factory=dict)
    """By the words of `LOSSY`: of the image made so to the original's."""


class Series:
    """Images of the same seeds and prompts, made in several ways by one pipeline."""

    def __init__(
        self, pipe: Any, prompts: list[str], count: int, steps: int, size: tuple[int, int], tick: Callable[[], None]
    ) -> None:
        self._pipe, self._steps, self._size, self._tick = pipe, steps, size, tick
        self._noise_dtype = torch.float32
        self.layers: list[str] = []
        """What the last accelerated ones computed in 8 bits, in sentences."""
        self.jobs = [(seed, prompts[seed % len(prompts)]) for seed in range(count)]

    def images(self) -> list[np.ndarray]:
        """All of them, (height, width, 3) of values from 0 to 1."""
        found = []
        for seed, prompt in self.jobs:
            found.append(self.image(seed, prompt, self._steps))
            self._tick()
        return found

    def image(self, seed: int, prompt: str, steps: int) -> np.ndarray:
        """One of them."""
        generator, (width, height) = torch.Generator("cpu").manual_seed(seed), self._size
        scale = self._pipe.vae_scale_factor
        shape = 1, self._pipe.unet.config.in_channels, height // scale, width // scale
        # the same numbers in each arithmetic
        noise = torch.randn(shape, generator=generator).to(self._noise_dtype).to(self._pipe.unet.dtype)
        with torch.inference_mode():
            made = self._pipe(
                prompt,
                width=width,
                height=height,
                num_inference_steps=steps,
                generator=generator,
                latents=noise.to(self._pipe.unet.device),
                output_type="np",
            )
        return made.images[0]

    def with_attention(self, name: str) -> list[np.ndarray]:
        """All of them by another attention of the UNet.

        Raises:
            Unavailable: there is none of this name here.
        """
        unet = self._pipe.unet
        own = dict(unet.attn_processors)
        upcast = [(attn, attn.upcast_attention) for _, attn in attentions.attention_layers(unet)]
        attentions.install(unet, name)
        try:
            return self.images()
        finally:
            unet.set_attn_processor(own)
            for attn, before in upcast:
                attn.upcast_attention = before

    def exact(self) -> list[np.ndarray]:
        """All of them in float32, without TF32. The weights are the same, to the bit, afterwards as well."""
        own = self._noise_dtype = self._pipe.unet.dtype
        pipelines.convert(self._pipe, torch.float32)
        try:
            with without_tf32():
                return self.images()
        finally:
            pipelines.convert(self._pipe, own)

    def accelerated(self, device: torch.device, **lossy: Any) -> tuple[list[np.ndarray], dict[str, str]]:
        """All of them with the UNet and the VAE's decoder accelerated; by part, why calls of it were not.

        Args:
            lossy: fields of `Config`, for the UNet.
        """
        config = replace(Config(allow_cpu=device.type == "cpu"), **lossy)
        parts = {UNET: accelerate(self._pipe.unet, config)}
        vae = Config(allow_cpu=config.allow_cpu, cuda_graphs=False, rare_calls=True, rare_gain=math.inf)
        parts[VAE] = accelerate(self._pipe.vae.decoder, vae)
        try:
            for _ in range(_WARM_UP):
                self.image(*self.jobs[0], steps=2)
            before = {name: _reasons(part) for name, part in parts.items()}
            made = self.images()
            self.layers = eight_bits.lines(eight_bits.summary([parts[UNET].status()]))
            return made, {name: why for name, part in parts.items() if (why := _bypassed(part, before[name]))}
        finally:
            for part in parts.values():
                part.release()


def _reasons(part: Accelerator) -> dict[str, int]:
    """Of calls that the original forward computed."""
    return dict(part.report.as_dict()["reasons"])


def _bypassed(part: Accelerator, before: dict[str, int]) -> str:
    counted = {reason: times - before.get(reason, 0) for reason, times in _reasons(part).items()}
    reasons = [f"{reason} ({times} calls)" for reason, times in counted.items() if times]
    if not reasons and part.plans:
        return ""
    return f"was not accelerated: {'; '.join(reasons) or 'it has no plan'}"


def compared(original: list[np.ndarray], other: list[np.ndarray]) -> list[Likeness]:
    """Each image with its original."""
    return [likeness(a, b) for a, b in zip(original, other, strict=True)]


def faults(rows: list[Row]) -> list[str]:
    """What is worse than it may be, a sentence each: farther from exact images than the original, where there are
    exact ones, else farther from the original than the yardstick."""
    found = [f"seed {row.seed}: a value is not finite" for row in rows if row.accelerated.psnr == -math.inf]
    found += [
        f"seed {row.seed} with {name}: a value is not finite"
        for row in rows
        for name, each in row.lossy.items()
        if each.psnr == -math.inf
    ]
    exact = _exact(rows)
    theirs, ours = zip(*exact) if exact else reversed(_columns(rows))
    at_least, reached = (median(each.psnr for each in some) for some in (theirs, ours))
    if reached < min(at_least - MARGIN_DB, UNSEEN_DB):
        more = "are farther from exact ones than the original's" if exact else "differ more than with another attention"
        whose = "the original's" if exact else "the yardstick's"
        found.append(f"the images {more}: the median PSNR is {reached:.1f} dB, {whose} {at_least:.1f} dB")
    return found


def _columns(rows: list[Row]) -> tuple[list[Likeness], list[Likeness]]:
    return [row.accelerated for row in rows], [row.yardstick for row in rows]


def _exact(rows: list[Row]) -> list[tuple[Likeness, Likeness]]:
    return [row.exact for row in rows if row.exact is not None]


def report(rows: list[Row], yardstick: str) -> str:
    """The table."""
    head = [word for name, _ in _MEASURES for word in (name.upper(), yardstick)]
    columns = [[getattr(each, name) for each in some] for name, _ in _MEASURES for some in _columns(rows)]
    digits = [each for _, each in _MEASURES for _ in range(2)]
    exact = _exact(rows)
    if exact:
        head += ["original to exact", "accelerated"]
        columns += [[pair[which].psnr for pair in exact] for which in (0, 1)]
        digits += [1, 1]
    lines = [
        (row.seed, *(number(column[i], each) for column, each in zip(columns, digits)), row.prompt)
        for i, row in enumerate(rows)
    ]
    middle = [number(None if None in column else median(column), each) for column, each in zip(columns, digits)]
    return "\n".join(
        [
            table(("seed", *head, "prompt"), [*lines, ("median", *middle, "")]),
            f"Left of each pair: with and without the accelerator. Right: the original with the attention {yardstick!r}"
            " and with 'sdp'.",
            "PSNR in dB, higher is nearer; SSIM, 1 for equal images; LPIPS, 0 for equal images.",
            *(["To exact: PSNR to the original's image in float32."] if exact else []),
        ]
    )


def side_by_side(rows: list[Row], yardstick: str) -> str:
    """The table of all ways: the median of each measure, and the lowest PSNR."""
    ways = {"accelerated": [row.accelerated for row in rows]}
    ways |= {name: [row.lossy[name] for row in rows] for name in rows[0].lossy}
    ways[f"original, {yardstick}"] = [row.yardstick for row in rows]
    lines = []
    for name, likes in ways.items():
        columns = [([getattr(each, measure) for each in likes], digits) for measure, digits in _MEASURES]
        middle = [number(None if None in column else median(column), digits) for column, digits in columns]
        lines.append((name, *middle, number(min(columns[0][0]), 1)))
    return table(("", *(name.upper() for name, _ in _MEASURES), "lowest PSNR"), lines)


def write_sheet(out: Path, rows: list[Row], original: list[np.ndarray], ways: Mapping[str, list[np.ndarray]]) -> None:
    """sheet.png: a row for each seed.

    Args:
        ways: images of the same seeds by the name of how they were made: "accelerated", those of `Row.lossy`, and last
            the yardstick.
    """
    lines = []
    for i, (row, image) in enumerate(zip(rows, original, strict=True)):
        cells, labels = [image], [f"seed {row.seed}"]
        for made, like in zip(ways.values(), (row.accelerated, *row.lossy.values(), row.yardstick), strict=True):
            seen, by = contact_sheet.difference(image, made[i])
            cells += [made[i], seen]
            labels += [f"{like.psnr:.1f} dB", f"x {by:g}"]
        lines.append((cells, labels))
    head = ["original", *(word for name in ways for word in (name, "difference"))]
    out.mkdir(parents=True, exist_ok=True)
    contact_sheet.sheet(head, lines).save(out / "sheet.png")


def _prompts(file: Path | None, ours: Sequence[str]) -> list[str]:
    """The lines of a file, or ours.

    Raises:
        Unavailable: it has none.
    """
    if file is None:
        return list(ours)
    found = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not found:
        raise Unavailable(f"{file} has no prompts: write one into each line")
    return found


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    return tree_map(lambda x: None if isinstance(x, float) and not math.isfinite(x) else x, value)


def lossy_here() -> tuple[list[str], list[str]]:
    """Of the fields of `LOSSY` those that change anything on this machine; and why the others do not, in sentences."""
    refused = eight_bits.refusal()
    here = {"faster_sums": environment.sums_in_half(), "eight_bits": refused is None}
    why = {"faster_sums": "it is for GeForce", "eight_bits": str(refused)}
    left_out = [f"{LOSSY[name]}: not compared, {why[name]}" for name, has in here.items() if not has]
    return [name for name, has in here.items() if has], left_out


def main(options: Options) -> int:
    """Make the images, print the table, write the sheet; 1 if something is not as it has to be.

    Raises:
        Unavailable: the model, the attention, or exact images cannot be had here.
    """
    from tqdm import tqdm

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    device = machine.device()
    dtype, steps, size = pipelines.scale(device, options.steps, options.size)
    if options.exact and dtype == torch.float32:
        raise Unavailable("--exact makes images in float32, as all are on a CPU: it needs an NVIDIA GPU")
    own_prompts = _prompts(options.prompts, ())
    pipe, name, known = pipelines.chosen(options.model, dtype=dtype, device=device)
    prompts = own_prompts or list(known or PROMPTS)
    pipe.set_progress_bar_config(disable=True)
    attentions.make(options.yardstick, attentions.attention_layers(pipe.unet)[0][1])
    print(f"{name} on {machine.describe()['gpu'] or 'the CPU'}", flush=True)
    if device.type == "cpu":
        pace.few_threads(pipe.unet)
    fields, remarks = lossy_here() if options.lossy else ([], [])
    pace.of_images(device, pipe.unet, size, (3 + len(fields)) * options.images * steps)
    with tqdm(
        total=(3 + options.exact + len(fields)) * options.images, unit="image", file=sys.stdout, dynamic_ncols=True
    ) as progress:
        series = Series(pipe, prompts, options.images, steps, size, progress.update)
        original = series.images()
        other = series.with_attention(options.yardstick)
        exact = series.exact() if options.exact else None
        ours, bypassed = series.accelerated(device)
        lossy: dict[str, list[np.ndarray]] = {}
        for each in fields:
            lossy[LOSSY[each]], why = series.accelerated(device, **{each: True})
            bypassed |= {f"{part} with {LOSSY[each]}": reason for part, reason in why.items() if part == UNET}
            remarks += series.layers
    to_ours, to_other = compared(original, ours), compared(original, other)
    rows = [Row(*job, a, b) for job, a, b in zip(series.jobs, to_ours, to_other, strict=True)]
    if exact is not None:
        for row, before, after in zip(rows, compared(exact, original), compared(exact, ours), strict=True):
            row.exact = before, after
    for way, made in lossy.items():
        for row, like in zip(rows, compared(original, made), strict=True):
            row.lossy[way] = like
    print(f"\n{report(rows, options.yardstick)}\n")
    if lossy:
        print(f"{side_by_side(rows, options.yardstick)}\n")
    print("".join(f"{line}\n" for line in remarks), end="")
    write_sheet(options.out, rows, original, {"accelerated": ours, **lossy, options.yardstick: other})
    print(f"{options.out}/sheet.png: the images and their differences")
    found = faults(rows) + [f"the {name} {why}" for name, why in bypassed.items() if name != VAE]
    for sentence in (*missing(), *(f"the {name} {why}" for name, why in bypassed.items() if name == VAE), *found):
        print(sentence)
    if options.json is not None:
        told = {
            "machine": machine.describe(), "model": options.model, "steps": steps, "size": size, "dtype": str(dtype),
            "yardstick": options.yardstick, "rows": [asdict(row) for row in rows], "faults": found,
        }  # fmt: skip
        options.json.write_text(json.dumps(_finite(told), indent=1), encoding="utf-8")
    return 1 if found else 0
