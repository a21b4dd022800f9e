"""Teaches a model of Stable Diffusion's shapes to write digits, so that images that are compared show something.

    python -m benchmarks.digits --model sd15 --out digits                 # on a GPU
    python -m sfast_ext quality --model ./digits --prompts digits/prompts.txt
    python -m benchmarks.digits --batch 128 --minutes 2 --out sfast_ext/tools/lib/digits.safetensors   # for `make demo`

The digits are scikit-learn's, of 8×8 pixels (E. Alpaydin and C. Kaynak, UCI, 1998), enlarged and side by side. A latent
is such an image in four fixed shades. UNet and VAE's decoder are trained, VAE's encoder and text encoders stay random.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from sfast_ext.tools.lib import machine, pipelines

NAMES = ("tiny-sd15", "sd15", "tiny-sdxl", "sdxl")
SHADES = (1.0, -1.0, 1.0, -1.0)
MEAN, SPREAD = -0.6, 0.68
"""Of the images' values from -1 to 1: latents have about the mean 0 and the variance 1, as those of a trained VAE."""
PAPER, INK = (0.94, 0.91, 0.84), (0.08, 0.15, 0.36)
NO_PROMPT = 0.1
"""How often an image is shown without its prompt, for guidance."""
LARGEST = 16
"""Height and width of a digit in a latent, at most."""
VAE_SHARE = 0.2
"""Of the time, for the VAE's decoder."""


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """All images, (1797, 1, 8, 8) of values from -1 to 1, and which digit each is. They are scikit-learn's, which
    need not be importable.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("the digits are scikit-learn's: pip install scikit-learn")
    file = Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    with gzip.open(file, "rt") as text:
        rows = torch.from_numpy(np.loadtxt(text, delimiter=","))
    return rows[:, :64].reshape(-1, 1, 8, 8).float() / 8 - 1, rows[:, 64].long()


class Digits:
    """All images, sorted by what they show."""

    def __init__(self, device: torch.device) -> None:
        images, shown = load()
        self._images = images[shown.argsort()].to(device)
        self._counts = shown.bincount(minlength=10).to(device)
        self._first = self._counts.cumsum(0) - self._counts

    def written(self, shown: torch.Tensor, count: int) -> torch.Tensor:
        """Of each digit of `shown` (n) so many images by chance, (n, count, 8, 8)."""
        counts = self._counts[shown, None]
        # the product may round up to the count
        number = (torch.rand(len(shown), count, device=shown.device) * counts).long().clamp(max=counts - 1)
        return self._images[self._first[shown, None] + number, 0]


def latents(images: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The latents (n, 4, height, width) of images (n, k, 8, 8), which lie side by side in cells, see `cells`."""
    size, (down, across) = cells(height, width)
    large = F.interpolate(F.pad(images, (1, 1, 1, 1), value=-1.0), (size, size), mode="bicubic").clamp(-1, 1)
    canvas = large.unflatten(1, (down, across)).transpose(2, 3).reshape(-1, 1, down * size, across * size)
    shades = torch.tensor(SHADES, device=images.device).view(1, 4, 1, 1)
    return (canvas - MEAN) / SPREAD * shades


def cells(height: int, width: int) -> tuple[int, tuple[int, int]]:
    """Of latents of a size: height and width of a cell, and how many there are down and across."""
    size = min(LARGEST, height, width)
    return size, (height // size, width // size)


def drawn(latent: torch.Tensor) -> torch.Tensor:
    """What the decoder is to make of latents: (n, 3, 8 height, 8 width), ink on paper, of values from -1 to 1."""
    value = latent[:, :1] * SPREAD + MEAN
    value = F.interpolate(value, scale_factor=8, mode="bicubic")
    ink, paper = (torch.tensor(each, device=latent.device).view(1, 3, 1, 1) for each in (INK, PAPER))
    return 2 * torch.lerp(paper, ink, torch.sigmoid(6 * value)) - 1


class Conditions:
    """What the UNet is told of each digit, and of no prompt, which is the last."""

    def __init__(self, pipe: Any, device: torch.device) -> None:
        self._xl = hasattr(pipe, "text_encoder_2")
        self._context, self._pooled = [], []
        for prompt in (*pipelines.DIGITS, ""):
            if self._xl:
                context, _, pooled, _ = pipe.encode_prompt(prompt, device=device, do_classifier_free_guidance=False)
                self._pooled.append(pooled)
            else:
                context, _ = pipe.encode_prompt(prompt, device, 1, False)
            self._context.append(context)

    def of(self, digits: torch.Tensor, height: int, width: int) -> dict[str, Any]:
        """The UNet's keyword arguments for images of these digits, with latents of such a size."""
        given: dict[str, Any] = {"encoder_hidden_states": torch.cat(self._context)[digits]}
        if self._xl:
            numbers = torch.tensor([[8.0 * height, 8.0 * width, 0.0, 0.0, 8.0 * height, 8.0 * width]])
            pooled = torch.cat(self._pooled)[digits]
            given["added_cond_kwargs"] = {"text_embeds": pooled, "time_ids": numbers.to(pooled).expand(len(digits), -1)}
        return given


def initialised(module: nn.Module) -> nn.Module:
    """With the weights that training begins with: PyTorch's own."""
    for part in module.modules():
        reset = getattr(part, "reset_parameters", None)
        if reset is not None:
            reset()
    return module.requires_grad_(True).train()


def train(
    module: nn.Module, losses: Iterator[torch.Tensor], rate: float, seconds: float, *, steps: int | None = None
) -> list[float]:
    """Minimise `losses` by AdamW until the time is over, or for so many steps; returns the losses. The weights are
    those of an average over the last steps."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(parameters, rate, weight_decay=0.0)
    average = [p.detach().clone() for p in parameters]
    began, seen = time.monotonic(), []
    for number, loss in enumerate(losses, 1):
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        gone = number / steps if steps is not None else (time.monotonic() - began) / seconds
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, number / 100, max(0.02, 2 * (1 - gone)))
        optimiser.step()
        optimiser.zero_grad()
        torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - min(0.998, number / (number + 9)))
        seen.append(loss.detach())
        if number % 200 == 0:
            print(f"{number}: {torch.stack(seen[-200:]).mean():.4f}", flush=True)
        if gone >= 1:
            break
    with torch.no_grad():
        torch._foreach_copy_(parameters, average)
    module.requires_grad_(False).eval()
    return torch.stack(seen).tolist()


def main(given: Sequence[str] | None = None) -> int:
    """Train, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=NAMES, default="tiny-sd15", help="the shapes (%(default)s)")
    parser.add_argument("--minutes", type=float, default=5.0, help="of training (%(default)s)")
    parser.add_argument("--steps", type=int, help="of each training, in place of --minutes")
    parser.add_argument("--batch", type=int, default=32, help="images in a step (%(default)s)")
    parser.add_argument(
        "--out", type=Path, required=True, help="a folder, as diffusers has it; *.safetensors: tiny-sd15's weights"
    )
    args = parser.parse_args(given)
    device, tiny = machine.device(), args.model.startswith("tiny-")
    # a smaller one takes a quarter of the time, and teaches nearly as much
    sizes = ((16, 16), (16, 16), (8, 24)) if tiny else ((32, 32), (32, 32), (64, 64))
    torch.manual_seed(0)
    digits = Digits(device)
    pipe = pipelines.random_pipeline(args.model, dtype=torch.float32, device=device)
    conditions = Conditions(pipe, device)
    noised: Any = pipe.scheduler
    half = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    def batch(number: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = sizes[number % len(sizes)]
        shown = torch.randint(10, (count,), device=device)
        return latents(digits.written(shown, math.prod(cells(*size)[1])), *size), shown

    def decoded() -> Iterator[torch.Tensor]:
        for number in itertools.count():
            clean, _ = batch(number, max(1, args.batch // 8))
            # what a sampler ends with is never clean
            rough = clean + 0.1 * torch.rand(1, device=device) * torch.randn_like(clean)
            with half:
                made = pipe.vae.decode(rough / pipe.vae.config.scaling_factor).sample
            yield F.mse_loss(made.float(), drawn(clean))

    def denoised() -> Iterator[torch.Tensor]:
        for number in itertools.count():
            clean, shown = batch(number, args.batch)
            unsaid = torch.rand(len(shown), device=device) < NO_PROMPT
            told = conditions.of(torch.where(unsaid, len(pipelines.DIGITS), shown), *clean.shape[2:])
            noise = torch.randn_like(clean)
            times = torch.randint(noised.config.num_train_timesteps, (len(clean),), device=device)
            with half:
                made = pipe.unet(noised.add_noise(clean, noise, times), times, **told, return_dict=False)[0]
            yield F.mse_loss(made.float(), noise)

    for part in (pipe.vae.decoder, pipe.vae.post_quant_conv, pipe.unet):
        initialised(part)
    seconds = 60 * args.minutes
    train(pipe.vae, decoded(), 2e-3 if tiny else 3e-4, VAE_SHARE * seconds, steps=args.steps)
    train(pipe.unet, denoised(), 2e-3 if tiny else 1e-4, (1 - VAE_SHARE) * seconds, steps=args.steps)
    pipelines.convert(pipe, torch.float16)
    if args.out.suffix == ".safetensors":
        pipelines.save_trained(pipe, args.out)
        return 0
    pipe.save_pretrained(args.out)
    (args.out / "prompts.txt").write_text("\n".join(pipelines.DIGITS) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
