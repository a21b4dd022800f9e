"""8 bits as the user of a WebUI meets them: a warning before details suffer, and what runs in 8 bits."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sfast_ext import eight_bits, host_gpu
from sfast_ext.accelerator import Accelerator
from sfast_ext.config import Config
from sfast_ext.hosts import reasons
from sfast_ext.reasons import Private, Reason
from sfast_ext.report import Report, words_of

FEW = 8
"""At most so many steps are few: an error of one of them is a larger part of the image."""
UNUSED = "8 bits are on and not used"
_FLASH = r"(sd|xl|pixart)[-_ .0-9]*flash(?![a-z])|(?<![a-z])flash[-_ ]?(sd|pixart|diffusion)"
_PLAIN = re.compile(rf"turbo|lightning|hyper[-_ ]?sd|{_FLASH}", re.IGNORECASE)
# "4stepLora", not "v1_steps", "15steps" or "epoch_4_step_2000"
_STEPS = re.compile(
    r"(?<![0-9.])(?<![vV])[1-8][-_ ]?(steps?|Steps?|STEPS?)(?![-_ ]?[0-9])(?=[^a-z]|(?:lora|model|unet|merge)|$)"
)
_WORDS = re.compile(
    r"(?<![a-z])(lcm|tcd|pcm|dmd2?|hyper|schnell|sdxs|distill(ed)?)(?![a-z])(?![-_ ]?real)", re.IGNORECASE
)
# as in "photonLCM_v10" and "sdxlDMD2"
_CAPITALS = re.compile(r"(?<=[a-z0-9])(LCM|TCD|PCM|DMD2?|Hyper)(?![a-z])")
_LORA = re.compile(r"<(?:lora|lyco):([^:>]+)", re.IGNORECASE)


def is_for_few_steps(name: object) -> bool:
    """Whether a model, a LoRA, a sampler or a schedule is made for few steps, as its name says."""
    return isinstance(name, str) and any(each.search(name) for each in (_PLAIN, _STEPS, _WORDS, _CAPITALS))


def doubt(p: Any, model: str | None) -> Reason | None:
    """Why 8 bits are likely to show in the images of a request; None if nothing is known against them.

    Args:
        p: the host's processing object.
        model: the name of the checkpoint.
    """
    hires = bool(getattr(p, "enable_hr", False))
    for name in (model, *_texts(p, "refiner_checkpoint", *["hr_checkpoint_name"] * hires), *_loras(p)):
        if is_for_few_steps(name):
            return reasons.FEW_STEP_MODEL(Private(name))
    for name in _texts(p, "sampler_name", "scheduler", *["hr_sampler_name", "hr_scheduler"] * hires):
        if is_for_few_steps(name):
            return reasons.FEW_STEP_SAMPLER(name)
    steps = getattr(p, "steps", None)
    if isinstance(steps, int) and 0 < steps <= FEW:
        return reasons.FEW_STEPS(steps)
    return None


def _told(accelerators: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [each for status in accelerators if isinstance(each := status.get("eight_bits"), Mapping)]


def _texts(p: Any, *names: str) -> list[str]:
    return [found for name in names if isinstance(found := getattr(p, name, None), str)]


def _loras(p: Any) -> list[str]:
    found = getattr(p, "prompt", None)
    prompts: Sequence[Any] = found if isinstance(found, (list, tuple)) else [found]
    return [name for prompt in prompts if isinstance(prompt, str) for name in _LORA.findall(prompt)]


class EightBits:
    """What is said of 8 bits in one session.

    Args:
        model_name: gives the name of the loaded checkpoint.
        loaded: gives the accelerator of its UNet; None if half-precision weights never stay in system memory.
    """

    def __init__(
        self,
        report: Report,
        model_name: Callable[[], str | None],
        loaded: Callable[[], Accelerator | None] | None = None,
    ) -> None:
        self._report, self._model_name, self._loaded = report, model_name, loaded
        self._size: tuple[weakref.ref[nn.Module], int] | None = None
        # of the last image; None if it is none, or 8 bits were off in it
        self._doubt: Reason | None = None
        self._on = False
        self._kept: dict[str, Any] | None = None

    def begin(self, p: Any, config: Config) -> Reason | None:
        """The images of a request are about to be made. Returns what its user should know; the console says it once."""
        self._on = config.enabled and config.eight_bits
        self._doubt = doubt(p, self._model_name()) if self._on else None
        if not self._on:
            return None
        note = self._unused() or self._doubt
        if note is not None:
            self._report.once("8 bits", note)
        return note

    def end(self, accelerators: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
        """They were made. What ran in 8 bits is kept on disk for `doctor` if that is new.

        Args:
            accelerators: gives their status.
        """
        found = eight_bits.summary(accelerators()) if self._on else eight_bits.NONE
        if found in (eight_bits.NONE, self._kept):
            return
        self._kept = found
        try:
            eight_bits.keep(found)
        except (OSError, RuntimeError) as exc:
            self._report.once("8 bits", f"the layers are not kept for doctor: {words_of(exc)}")

    def status(self, config: Config, accelerators: Sequence[Mapping[str, Any]], names: bool = True) -> dict[str, Any]:
        """What the status has of it: whether it is on, the layers, and a note on what the user should know.

        Args:
            names: whether the note has names that belong to the user.
        """
        on, found = config.enabled and config.eight_bits, eight_bits.summary(accelerators)
        # a request may have switched them on for itself
        note = self._doubt or self._doubt_of_model() if on else self._doubt
        if on and not found["layers"]:
            why = next((each["reason"] for each in _told(accelerators) if each.get("reason")), None)
            if why is not None:
                return {"on": on, **found, "note": why["text"], "note_parts": [why["text"]], "help": why["code"]}
            note = self._unused() or note
        if note is None and config.enabled and not on and self._missing is None:
            note = self._fits()
        if note is not None and not names:
            note = note.anonymous()
        told: dict[str, Any] = {"note": None, "note_parts": [], "help": None}
        if note is not None:
            told = {"note": str(note), "note_parts": note.pieces(), "help": note.code}
        return {"on": on, **found, **told}

    def _doubt_of_model(self) -> Reason | None:
        name = self._model_name()
        return reasons.FEW_STEP_MODEL(Private(name)) if name is not None and is_for_few_steps(name) else None

    def _fits(self) -> Reason | None:
        """What is to be told of a card that has room for the loaded model in 8 bits alone."""
        accelerator = self._loaded() if self._loaded is not None and torch.cuda.is_available() else None
        if accelerator is None:
            return None
        module = accelerator.module
        if self._size is None or self._size[0]() is not module:
            self._size = weakref.ref(module), sum(p.nbytes for p in module.parameters())
        total = torch.cuda.get_device_properties(host_gpu.index()).total_memory
        return eight_bits.fits(total, self._size[1], "the model")

    @functools.cached_property
    def _missing(self) -> Reason | None:
        # of the machine; the status is asked each second
        return eight_bits.refusal()

    def _unused(self) -> Reason | None:
        return None if self._missing is None else self._missing.of(UNUSED)
