"""`python -m sfast_ext doctor`: what this machine has, and what will therefore be used."""

from __future__ import annotations

import json
from typing import Any

import torch

from sfast_ext import __version__, eight_bits, environment, last_start, reasons
from sfast_ext.kernels.backend import choices
from sfast_ext.tools import measured
from sfast_ext.tools.lib import machine

NOT_ON_WINDOWS = (
    "Stable Fast was not run on Windows by those who write it. Whether it works for you or not: an issue with this"
    " text, and with what 'Copy a report' in the tab Stable Fast gives, helps everybody who has Windows."
)

LISTED = 5
"""So many of the layers that stay in half precision with 8 bits are named if nobody asks for all."""

_NAMES = {
    "sfast_ext": "Stable Fast",
    "python": "Python",
    "platform": "System",
    "gpu": "GPU",
    "compute_capability": "Compute capability",
    "gpu_memory_mb": "GPU memory (MB)",
    "driver": "Driver",
    "torch": "torch",
    "cuda": "CUDA of torch",
    "cudnn": "cuDNN",
    "triton": "Triton",
    "nvrtc": "NVRTC",
    "nvrtc_file": "File of NVRTC",
    "xformers": "xformers",
    "diffusers": "diffusers",
    "compiler": "C compiler",
}


def collect() -> dict[str, Any]:
    """What was found, as JSON can carry; `used` says what follows from it, `known_bad` what does not work here."""
    if torch.cuda.is_available():
        environment.triton_runs_on(torch.device("cuda"))  # what it tries is told below
    found = {"sfast_ext": __version__, **environment.describe()}
    found["driver"] = found.get("driver") or (machine.driver() if found["gpu"] else None)
    found["nvrtc_file"] = environment.nvrtc_file()
    found["diffusers"] = environment.version("diffusers")
    found["used"] = used(found)
    found["last_start"] = last_start.read()
    refused = eight_bits.refusal()
    fits = eight_bits.fits(found["gpu_memory_mb"] << 20) if refused is None and found.get("gpu_memory_mb") else None
    found["eight_bits"] = {"refused": reasons.text(refused), "fits": reasons.text(fits), "last": eight_bits.read()}
    known = choices.memory_of(machine.device()).choices() if found["gpu"] else {}
    found["measured"] = {what: {key: one._asdict() for key, one in keys.items()} for what, keys in known.items()}
    return found


def used(found: dict[str, Any]) -> list[str]:
    """What will run on a machine of this description, a sentence each."""
    if not found["gpu"]:
        of_torch = (
            ["This torch is built for CPUs. With an NVIDIA GPU, install one for CUDA: docs/troubleshooting.md#no-gpu."]
            if "cuda" in found and not found["cuda"]
            else []
        )
        return [
            "No GPU: every call goes to the original forward, unless the settings allow plans on the CPU.",
            "On the CPU plans run in PyTorch, without CUDA graphs and without Triton: for trying it, not for speed.",
            *of_torch,
        ]
    where = torch.device("cuda")
    if environment.triton_runs_on(where):
        kernels = "Fused kernels: Triton, and CUDA C++ if that is quicker."
    elif found["nvrtc"]:
        kernels = "Fused kernels: CUDA C++, for norms, activations and biases. Triton adds more."
    else:
        kernels = "Fused kernels: none; PyTorch's own run in their place."
    return [
        "The UNet is captured, rewritten and replayed as CUDA graphs, one for each size, batch and prompt length.",
        kernels,
        f"Attention: the fastest of PyTorch's (cuDNN {found['cudnn']}, flash, memory-efficient) and of xformers', as"
        " measured on this GPU if PyTorch is 2.6 or later; on Hopper the extension's kernels if they are quicker.",
        "Convolutions, and products with GEGLU: cuDNN's and cuBLAS's; on Hopper the extension's kernels if they are"
        " quicker.",
    ]


def text(found: dict[str, Any], every_layer: bool = False) -> str:
    """What was found, for a person.

    Args:
        every_layer: whether each layer is named that stays in half precision with 8 bits.
    """
    width = max(map(len, _NAMES.values()))
    lines = [f"{name.ljust(width)}  {found[key]}" for key, name in _NAMES.items() if found.get(key) is not None]
    missing = [name for key, name in _NAMES.items() if found.get(key) is None]
    lines.append(f"{'Not here'.ljust(width)}  {', '.join(missing) or 'nothing is missing'}")
    lines += ["", "What will be used", *(f"  {line}" for line in found["used"])]
    lines += ["", "8 bits", *(f"  {line}" for line in _eight_bits(found["eight_bits"], every_layer))]
    started = found["last_start"]
    if started is not None:
        said = started["lines"] or ["All that it relies on was there."]
        lines += ["", f"At its last start, in {started.get('host')}", *(f"  {line}" for line in said)]
    if found["measured"]:
        known = {
            what: {k: choices.Choice(**one) for k, one in keys.items()} for what, keys in found["measured"].items()
        }
        lines += ["", "Measured on this GPU", *measured.report(known)]
    if found["known_bad"]:
        lines += ["", "Known not to work here", *(f"  {line}" for line in found["known_bad"])]
    if str(found["platform"]).startswith("Windows"):
        lines += ["", NOT_ON_WINDOWS]
    return "\n".join(lines)


def _eight_bits(found: dict[str, Any], every_layer: bool) -> list[str]:
    refused, last = found["refused"], found["last"]
    lines = ["They can be used on this machine." if refused is None else f"Not used on this machine: {refused}."]
    if found.get("fits"):
        lines.append(f"{found['fits']}.")
    if last is None:
        return [*lines, "In the WebUI no image was made with them."]
    said = eight_bits.lines(last, None if every_layer else LISTED)
    return [*lines, "In the last image of the WebUI with them:", *(f"  {line}" for line in said)]


def main(as_json: bool, every_layer: bool = False) -> int:
    """Print it; 0 always: a machine without a GPU is no fault."""
    found = collect()
    print(json.dumps(found, indent=2) if as_json else text(found, every_layer))
    return 0
