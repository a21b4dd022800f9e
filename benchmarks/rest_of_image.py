"""Preview decoders and upscalers on a GPU: PyTorch's time and that of plans; what a preview costs the steps.

    PYTHONPATH=. python -m benchmarks.rest_of_image [--model sd15 sdxl] [--steps 150]

Random weights in half precision. First the time of one call in each way, in one process and in turns; then steps of a
UNet while a thread decodes previews of their latent, as the WebUI does for whoever asks for its progress.
"""

from __future__ import annotations

import argparse
import math
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import image_networks
from sfast_ext import Accelerator, Config, accelerate
from sfast_ext.tools.lib import models

CUDA = torch.device("cuda")
RARE = Config(cuda_graphs=False, rare_calls=True, rare_gain=math.inf, drop_slower=False)
SIZES = {"sd15": 512, "sdxl": 1024}
EVERY_S = 0.1
"""Between two previews. The WebUI asks once a second; more often shows more of what each costs."""


def plan_of(module: Any, x: torch.Tensor, config: Config) -> Accelerator:
    """An accelerator with a plan for this input."""
    ours = accelerate(module, config)
    for _ in range(4):
        module(x)
    torch.cuda.synchronize()
    if not ours.plans:
        raise RuntimeError(f"no plan: {ours.report.as_dict()['reasons']}")
    return ours


def once(run: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of the GPU, and of the thread until it is done."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began = time.perf_counter()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end), 1000 * (time.perf_counter() - began)


def alternately(ways: dict[str, Callable[[], Any]], rounds: int = 15) -> dict[str, float]:
    """The median of each way's times until it is done."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 2):
        for name, run in ways.items():
            taken = once(run)[1]
            if round_ > 1:
                times[name].append(taken)
    return {name: statistics.median(each) for name, each in times.items()}


def calls(name: str, make: Callable[[], Any], x: torch.Tensor) -> None:
    """One line: a network in each way."""
    eager, last, planned, graphed = make(), make().to(memory_format=torch.channels_last), make(), make()
    x_last = x.contiguous(memory_format=torch.channels_last)
    began = time.perf_counter()
    ours = plan_of(planned, x, RARE)
    built = time.perf_counter() - began
    with_graph = plan_of(graphed, x, Config(drop_slower=False))
    error = float((planned(x) - eager(x)).float().norm() / eager(x).float().norm())
    ways = {
        "PyTorch": lambda: eager(x),
        "channels-last": lambda: last(x_last),
        "plan": lambda: planned(x),
        "plan with a CUDA graph": lambda: graphed(x),
    }
    found = alternately(ways)
    words = ", ".join(f"{way} {ms:.2f}" for way, ms in found.items())
    (plan,) = ours.plans.values()
    fused = {each: count for each, count in plan.fused.items() if count}
    print(f"{name}: {words} ms; ratio {found['plan'] / found['PyTorch']:.3f}; error {error:.1e}; made in {built:.2f} s")
    print(f"  {fused}", flush=True)
    ours.release()
    with_graph.release()


def recorded(size: int) -> None:
    """One line: a preview while torch records gradients, as in AUTOMATIC1111's thread for the progress, and not."""
    decoder = image_networks.preview_decoder(dtype=torch.float16, device=CUDA).requires_grad_(True)
    x = torch.randn(1, 4, size // 8, size // 8, dtype=torch.float16, device=CUDA)

    def peak(enabled: bool) -> float:
        with torch.set_grad_enabled(enabled):
            decoder(x).detach()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            decoder(x).detach()
            torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    with torch.enable_grad():
        with_gradients = alternately({"": lambda: decoder(x).detach()})[""]
    without = alternately({"": lambda: decoder(x).detach()})[""]
    print(
        f"TAESD {size}x{size}, gradients recorded: {with_gradients:.2f} ms and {peak(True):.0f} MB at the peak,"
        f" not recorded: {without:.2f} ms and {peak(False):.0f} MB",
        flush=True,
    )


class Previews:
    """Decodes the latest latent in another thread, as the WebUI's progress does."""

    def __init__(self, decode: Callable[[torch.Tensor], torch.Tensor], stream: torch.cuda.Stream | None) -> None:
        self.decode, self.stream = decode, stream
        self.latent: torch.Tensor | None = None
        self.done = 0
        self.seconds: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Previews:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            latent = self.latent
            if latent is None:
                continue
            began = time.perf_counter()
            with torch.inference_mode():
                if self.stream is None:
                    self._image(latent)
                else:
                    self.stream.wait_stream(torch.cuda.default_stream())
                    with torch.cuda.stream(self.stream):
                        self._image(latent)
            self.seconds.append(time.perf_counter() - began)
            self.done += 1

    def _image(self, latent: torch.Tensor) -> Any:
        # as modules/sd_samplers_common.py of AUTOMATIC1111 does it
        x = self.decode(latent[:1].half())[0] * 2 - 1
        x = torch.clamp(x * 0.5 + 0.5, min=0.0, max=1.0)
        return (255.0 * x.cpu().numpy().transpose(1, 2, 0)).astype("uint8")


def steps(name: str, count: int) -> None:
    """Lines: steps of a UNet, with previews in each way."""
    size = SIZES[name] // 8
    unet = models.random_unet(name, dtype=torch.float16, device=CUDA)
    args, kwargs = inputs(name, unet, size)
    plan = plan_of_unet(unet, args, kwargs)
    eager, planned = (image_networks.preview_decoder(dtype=torch.float16, device=CUDA) for _ in range(2))
    latent = torch.randn(1, 4, size, size, device=CUDA)
    ours = plan_of(planned, latent.half(), RARE)
    side = torch.cuda.Stream()
    ways: dict[str, Previews | None] = {
        "none": None,
        "PyTorch": Previews(eager, None),
        "PyTorch, other stream": Previews(eager, side),
        "plan": Previews(planned, None),
        "plan, other stream": Previews(planned, side),
    }
    base = 0.0
    for way, previews in ways.items():
        ms = run_steps(unet, args, kwargs, count, previews)
        if previews is None:
            base = ms
            print(f"{name}: {base:.3f} ms a step without previews")
            continue
        cost = (ms - base) * count / max(1, previews.done)
        took = 1000 * statistics.median(previews.seconds) if previews.seconds else math.nan
        costs = f"{previews.done} previews, each {cost:.2f} ms of the steps and {took:.1f} ms long"
        print(f"{name}, {way}: {ms:.3f} ms a step, {costs}", flush=True)
    again = run_steps(unet, args, kwargs, count, None)
    print(f"{name}: {again:.3f} ms a step without previews, again")
    ours.release()
    plan.release()


def plan_of_unet(unet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Accelerator:
    """Its accelerator, with a plan for these arguments."""
    ours = accelerate(unet, Config())
    with torch.inference_mode():
        for _ in range(3):
            unet(*args, **kwargs)
    torch.cuda.synchronize()
    return ours


def inputs(name: str, unet: Any, size: int, device: torch.device = CUDA) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a step: a latent, a timestep and a prompt, with and without the prompt."""
    half: dict[str, Any] = {"dtype": torch.float16, "device": device}
    sample, prompt = torch.randn(2, 4, size, size, **half), torch.randn(2, 77, unet.config.cross_attention_dim, **half)
    kwargs: dict[str, Any] = {"return_dict": False}
    if name == "sdxl":
        added = {"text_embeds": torch.randn(2, 1280, **half), "time_ids": torch.randn(2, 6, **half)}
        kwargs["added_cond_kwargs"] = added
    return (sample, torch.tensor(500, device=device), prompt), kwargs


@torch.inference_mode()
def run_steps(unet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], count: int, previews: Previews | None) -> float:
    """Milliseconds of a step."""
    sample = args[0]
    torch.cuda.synchronize()
    if previews is not None:
        previews.__enter__()
    began = time.perf_counter()
    try:
        for _ in range(count):
            out = unet(sample, *args[1:], **kwargs)[0]
            cond, uncond = out.chunk(2)
            denoised = uncond + 7.0 * (cond - uncond)
            if previews is not None:
                previews.latent = denoised.float()
            # a sampler reads its sigmas, which waits for the step
            torch.cuda.current_stream().synchronize()
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - began) / count
    finally:
        if previews is not None:
            previews.__exit__()


@torch.no_grad()
def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="*", default=["sd15", "sdxl"], choices=sorted(SIZES))
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()
    half: dict[str, Any] = {"dtype": torch.float16, "device": CUDA}
    print(torch.cuda.get_device_name(), torch.__version__)
    for size in (512, 1024):
        x = torch.randn(1, 4, size // 8, size // 8, **half)
        calls(f"TAESD {size}x{size}", lambda: image_networks.preview_decoder(**half), x)
    for size in (512, 1024):
        recorded(size)
    for size in (image_networks.TILE, 512):
        x = torch.rand(1, 3, size, size, **half)
        calls(f"ESRGAN {size}x{size}", lambda: image_networks.esrgan(**half), x)
    for name in args.model:
        steps(name, args.steps if name == "sd15" else args.steps // 3)


if __name__ == "__main__":
    main()
