"""Which entry of docs/troubleshooting.md explains a reason of the report.

A test compares this table with the reasons that the code can give, and with the entries of that page.
"""

from __future__ import annotations

import re

OTHER = "other"
"""The entry for a text that no row knows."""

TABLE: tuple[tuple[str, str], ...] = (
    ("no-gpu", r"the model is on the CPU|the model is on .*not on a GPU|torch finds no NVIDIA GPU"),
    ("unsupported-gpu", r"this torch is built for ROCm|the GPU has compute capability"),
    ("unserved", r"this WebUI lacks what Stable Fast relies on"),
    ("hypernetwork", r"a hypernetwork is active"),
    ("hypertile", r"Hypertile is on|HyperTile draws its tiles"),
    ("token-merging", r"token merging"),
    ("fp8", r"FP8 weight storage is on"),
    ("other-sd-unet", r"another UNet is active"),
    (
        "lora-inside-layers",
        r"LoRA is computed inside the layers|LoRA is loaded by diffusers|the extension Lora works in a way",
    ),
    ("lowvram", r"--lowvram moves"),
    (
        "offload",
        r"offload mode|the refiner is moved off the GPU|parts of the UNet do not fit on the GPU"
        r"|Forge keeps a part of the UNet in system memory",
    ),
    (
        "compiled",
        r"SD\.Next has compiled this model|its forward calls a function that torch\.compile made"
        r"|another function is in the place of the model's own call",
    ),
    ("quantised", r"the model is quantised"),
    ("no-unet", r".* has no UNet;"),
    ("step-cache", r"DeepCache skips|T-Gate skips"),
    (
        "attention-features",
        r"perturbed attention guidance|the Reference unit|sparse attention|LinFusion replaces|.* works inside the UNet",
    ),
    ("diffusers-hooks", r"diffusers has put hooks on layers"),
    ("runs-layers-itself", r".* replaces the model's forward and calls none of its blocks"),
    (
        "another-extension",
        r".* has a foreign |.* is (replaced by|gone)|.* is in place of the forward of |.* is on; turn",
    ),
    ("unknown-value", r"the forward can read "),
    ("changes-again", r"what the model computes changes again and again|an argument changes at each step"),
    (
        "torch-state",
        r".*is active around the call: it sees|torch\.jit\.trace, or an export|torch\.func transforms|torch\.fx records"
        r"|derivatives are computed in forward mode|overrides of torch's functions are switched off"
        r"|torch\.nn\.utils\.parametrize\.cached|torch\.library replaces"
        r"|the program (captures|has captured) a CUDA graph",
    ),
    ("training", r"gradients are being recorded"),
    ("random-numbers", r"its forward draws random numbers|.* with dropout, which draws random numbers"),
    ("state", r"its forward keeps state between calls|its forward (writes to|replaces the data of) "),
    (
        "depends-on-values",
        r"its forward reads a value from the device|its forward reads a tensor "
        r"|its forward reads the value of a weight|its forward reads a number from a tensor",
    ),
    ("different-picture", r"its plan differs from the original"),
    ("slower", r"its plan is slower than the original"),
    (
        "out-of-memory",
        r"the GPU has (no|too little) memory left|(no plan could be built|its plan failed): .*OutOfMemoryError",
    ),
    ("failed", r"no plan could be built|its plan failed"),
    (
        "weights-elsewhere",
        r"(the|some) weights are on |the memory of the weights was given back|the weights were replaced while",
    ),
    (
        "arguments",
        r".* is a dict with keys|.* which a plan cannot take as an input|.* not a plain tensor"
        r"|.* is on the meta device|.* is on .*, the model on |its forward changes .*, one of its arguments"
        r"|the same list is there twice among its arguments",
    ),
    ("cannot-be-recorded", r".*cannot be recorded|.*can be recorded|an argument of .* is a "),
    ("many-reasons", r"\(further reasons\)"),
)
"""Entries with the beginnings of reasons, first match first."""

_COMPILED = [(code, re.compile(pattern)) for code, pattern in TABLE]


def code_of(reason: str) -> str:
    """The entry for a reason, as its anchor on the page."""
    return next((code for code, pattern in _COMPILED if pattern.match(reason)), OTHER)
