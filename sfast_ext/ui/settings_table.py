"""The settings of Settings > Stable Fast: their groups, labels, explanations and values."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from sfast_ext.config import BOUNDS, Config

CHECK_LABELS = {"first use": "first", "always": "always", "never": "never"}
"""The choices as the user reads them, with the values that Config has for them."""


@dataclass(frozen=True)
class HostConfig(Config):
    """Settings of a WebUI: those of each accelerator, and what is done in addition."""

    vae: bool = True
    """Whether the VAE is accelerated as well."""
    text_encoders: bool = True
    """Whether text encoders are accelerated as well."""
    png: bool = True
    """Whether the WebUI's PNG files are compressed by several threads."""
    earned: bool = True
    ahead: bool = True
    """Whether the size used last is prepared after the start, while no image is made."""


@dataclass(frozen=True)
class Setting:
    """One option: its name in the WebUI's settings, the field of HostConfig that it sets, its label and explanation.

    Its type, default and bounds are those of the field.
    """

    key: str
    field: str
    label: str
    info: str
    slider: tuple[float, float] | None = None
    """Maximum and step of a number; None for a checkbox or a choice."""
    choices: tuple[str, ...] = ()
    group: str = "main"
    infotext: str | None = None
    """What it is called in an image's infotext, if it can change pixels."""

    @property
    def kind(self) -> type:
        """The type of its values as the user gives them."""
        if self.choices:
            return str
        default = getattr(HostConfig, self.field)
        # graph_memory_mb: as much as fits the GPU
        return int if default is None else type(default)

    @property
    def valid(self) -> str:
        """The valid values, in words."""
        if self.choices:
            return ", ".join(self.choices)
        return "true or false" if self.kind is bool else BOUNDS[self.field].words


MAIN, MEMORY, EXPERT = "main", "memory", "expert"
"""The groups of the page, in this order."""

HELP = "./sfast/v1/help"
"""Where the extension serves its page of troubleshooting; relative, so that it is right behind a proxy."""

INTRO = (
    "Stable Fast makes the sampling steps faster on NVIDIA GPUs, without changing the image beyond half-precision "
    f'rounding. <a href="{HELP}" target="_blank">When an image is not faster</a>'
)
HEADINGS = {
    MAIN: ("sfast_intro", INTRO),
    MEMORY: ("sfast_memory_heading", "<h3>GPU memory</h3>"),
    EXPERT: ("sfast_expert_heading", "<h3>For experts</h3> The defaults are right for nearly everybody."),
}
"""Before each group: the key of its heading, and its HTML."""

SETTINGS = (
    Setting(
        "sfast_enabled",
        "enabled",
        "Make images faster with Stable Fast",
        "The second image of a size takes a few seconds longer, the next ones are faster. Off: the WebUI's own code "
        "makes the image, for comparison",
    ),
    Setting(
        "sfast_vae",
        "vae",
        "Accelerate the VAE",
        "The VAE decodes each image, and encodes what img2img and hires fix start from. When it pays for a size, one "
        "image takes about a second longer, and the next ones are decoded faster. Not in Forge",
    ),
    Setting(
        "sfast_text_encoders",
        "text_encoders",
        "Accelerate the text encoders",
        "They read each new prompt. When it pays, one image takes about half a second longer, and the prompts of the "
        "next ones are read faster",
    ),
    Setting(
        "sfast_png",
        "png",
        "Write PNG files with several cores",
        "The WebUI compresses them with one core, which takes about 0.2 seconds for an image of 1024x1024, and longer "
        "for a grid. Pixels, infotext and the size of the file stay the same",
    ),
    Setting(
        "sfast_ahead",
        "ahead",
        "Prepare the last size after the start",
        "In AUTOMATIC1111, while no image is made after its start, the size, batch and prompt length used last are "
        "prepared, so that the first image is fast as well. It ends when an image begins. Not on cards below 12 GB, "
        "and not with --medvram or --lowvram",
    ),
    Setting(
        "sfast_faster_sums",
        "faster_sums",
        "Faster sums on GeForce",
        "GeForce RTX cards (20, 30, 40 and 50) add up at twice the rate in half precision. If it is faster on your "
        "card, linear layers, convolutions and attention in float16 do so, 32 to 64 products at a time. Details of the "
        "image may change. On other cards it does nothing",
        infotext="Stable Fast faster sums",
    ),
    Setting(
        "sfast_eight_bits",
        "eight_bits",
        "8 bits",
        "Linear layers, convolutions and part of attention use whole numbers of 8 bits if that is faster, as on "
        "GeForce RTX 20 and later. What is too sensitive stays as it is. Details of the image change. Not for models "
        "of few steps (Turbo, LCM, Lightning). Takes GPU memory of up to half the model's size",
        infotext="Stable Fast 8 bits",
    ),
    Setting(
        "sfast_graph_memory_mb",
        "graph_memory_mb",
        "GPU memory for fast replays (MB)",
        "More keeps more image sizes fast at once; less leaves room for large images and other models. Above it the "
        "least recently used sizes are freed, and prepared again when needed. 0: no limit",
        group=MEMORY,
        slider=(32768, 256),
    ),
    Setting(
        "sfast_max_graphs",
        "max_graphs",
        "Most sizes kept ready",
        "Each combination of size, batch and prompt length counts as one. More saves preparing again when you switch "
        "between sizes, and takes more memory",
        group=MEMORY,
        slider=(64, 1),
    ),
    Setting(
        "sfast_cuda_graphs",
        "cuda_graphs",
        "Replay CUDA graphs",
        "Removes the CPU time for launching kernels, which is most of the gain at small sizes. Takes GPU memory for "
        "each size in use",
        group=EXPERT,
    ),
    Setting(
        "sfast_triton",
        "triton",
        "Use fused Triton kernels",
        "They read and write memory fewer times in norms and activations. They are compiled once, which takes some "
        "seconds, and cached on disk. Without Triton, kernels in CUDA C++ and PyTorch's run",
        group=EXPERT,
    ),
    Setting(
        "sfast_check",
        "check",
        "Compare steps with the WebUI's own",
        "first use: one extra step for each new size; one whose result differs is not accelerated. always: every step "
        "runs twice, for troubleshooting. never: no extra step, nothing is checked",
        group=EXPERT,
        choices=tuple(CHECK_LABELS),
        infotext="Stable Fast check",
    ),
    Setting(
        "sfast_tolerance",
        "tolerance",
        "Maximum relative error in that comparison",
        "Half-precision rounding stays well below the default. A lower value accelerates fewer sizes. "
        "A higher value accepts larger differences",
        group=EXPERT,
        slider=(0.1, 0.001),
        infotext="Stable Fast tolerance",
    ),
    Setting(
        "sfast_allow_cpu",
        "allow_cpu",
        "Also run on the CPU",
        "For trying the extension without a GPU. It is not faster there",
        group=EXPERT,
    ),
)

SAME, FASTER, SMALL = "same image", "faster sums on GeForce", "small card"
EIGHT = "8 bits (faster, details change)"
PRESET = Setting(
    "sfast_preset",
    "preset",
    "Preset",
    "same image: the settings below as they are. faster sums on GeForce: switches that option on. "
    "8 bits: switches that option on. small card: at most an eighth of the GPU's memory and four sizes kept ready, "
    "whatever is set below; sizes are prepared again more often",
    choices=(SAME, FASTER, EIGHT, SMALL),
)
FORMER = {(PRESET.key, "same picture"): SAME}
"""Choices by the key of their setting and the name that they had: WebUIs have stored it, and requests may name it."""
SIZES_OF_SMALL = 4

LOG_LEVEL = Setting(
    "sfast_log_level",
    "log_level",
    "What Stable Fast writes to the console",
    "normal: what was found, the steps of a preparation, and each kind of failure once. quiet: failures only. debug: "
    "everything, with tracebacks, for a bug report",
    group=EXPERT,
    choices=("quiet", "normal", "debug"),
)
LEVELS = {"quiet": logging.WARNING, "normal": logging.INFO, "debug": logging.DEBUG}

ENABLED = SETTINGS[0]
ALL = (ENABLED, PRESET, *SETTINGS[1:], LOG_LEVEL)
"""In the order of the page."""
KEYS = tuple(setting.key for setting in ALL)
WORDS = {PRESET.key: SAME, LOG_LEVEL.key: "normal"}
"""Defaults of the settings that are no field of HostConfig."""


def named_now(key: str, value: Any) -> Any:
    """A setting's value; a choice by the name that it has now."""
    return FORMER.get((key, value), value) if isinstance(value, str) else value
