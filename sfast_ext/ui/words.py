"""What is said to people who make pictures: sizes instead of shapes, and the state in a few words.

Text here is ASCII, as all that may reach a console; the page writes "x" between numbers as a multiplication sign.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sfast_ext.ui.reasons import code_of

PIXELS = 8
"""Pixels of an image for each of its latent, along a side: that of every VAE of SD 1, 2 and XL."""
LATENT_CHANNELS = 16
"""No latent has more channels; feature maps inside the network do."""
COUNTED, CHUNK = 75, 77
"""Tokens of a chunk of a prompt: by the WebUI's counter, and with the start and the end that the model gets."""


def size_words(shapes: Sequence[tuple[int, ...]], pictures: int | None = None) -> str | None:
    """A call of the UNet in a user's words, such as "512x512, 1 picture, 77 tokens"; None where it is no such call.

    Args:
        shapes: of the tensors among its arguments.
        pictures: how many are made at once, where the host says so: with guidance a call has two rows for each.
    """
    latent = next((shape for shape in shapes if len(shape) == 4), None)
    if latent is None or latent[1] > LATENT_CHANNELS:
        return None
    rows, _, height, width = latent
    said = [f"{width * PIXELS}x{height * PIXELS}"]
    if pictures is not None and pictures > 0 and rows % pictures == 0:
        said.append("1 picture" if pictures == 1 else f"{pictures} pictures")
    else:
        said.append(f"batch {rows}")
    prompt = next((shape for shape in shapes if len(shape) == 3), None)
    if prompt is not None:
        said.append(f"{prompt[1]} tokens")
    return ", ".join(said)


def vae_words(part: str, shapes: Sequence[tuple[int, ...]]) -> str | None:
    """A call of a part of a VAE in a user's words, such as "VAE decoder, 512x512"; None where it is no such call.

    Args:
        part: "decoder" or "encoder".
        shapes: of the tensors among its arguments.
    """
    given = next((shape for shape in shapes if len(shape) == 4), None)
    if given is None:
        return None
    pixels = PIXELS if part == "decoder" else 1
    rows, _, height, width = given
    said = f"VAE {part}, {width * pixels}x{height * pixels}"
    return said if rows == 1 else f"{said}, {rows} pictures"


def pictures_of(label: str, shapes: Sequence[tuple[int, ...]]) -> int | None:
    """How many pictures a label of `size_words` for these shapes is of; None where it does not say."""
    rows = next((shape[0] for shape in shapes if len(shape) == 4), 0)
    return next((n for n in range(1, rows + 1) if rows % n == 0 and size_words(shapes, n) == label), None)


def plan_words(plan: Mapping[str, Any], unit: str = "step") -> str:
    """A plan in one line: "512x512, 1 picture, 77 tokens: 2.1x (31.0 -> 14.8 ms a step)".

    Args:
        unit: what one call of it is.
    """
    times = plan.get("speedup")
    if times is None:
        return f"{plan['label']}: not compared in time"
    return f"{plan['label']}: {times:.1f}x ({plan['ms_before']:.1f} -> {plan['ms_after']:.1f} ms a {unit})"


def plan_of_last_picture(accelerators: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Of the plans that the last picture used, by the status of accelerators, the one with the most steps. Those of
    networks whose calls are no steps do not count."""
    of_steps = (each for each in accelerators if each.get("steps", True))
    plans = [plan for each in of_steps for plan in each.get("plans", ()) if plan.get("last_pass")]
    return max(plans, key=lambda plan: plan["replays"], default=None)


def badge(status: Mapping[str, Any]) -> dict[str, str | None]:
    """The state in a word, a few words for the badge, a sentence for its details, and the entry of the help on what to
    do about it; None where there is nothing to do."""
    state, text, detail = _state(status)
    none, reason = status.get("unserved") or status.get("no_gpu"), _reason(status)
    why = {"none": none, "original": reason, "partly": reason}.get(state)
    return {"state": state, "text": text, "detail": detail, "help": None if why is None else code_of(why)}


def _reason(status: Mapping[str, Any]) -> str | None:
    """Why most of the last picture's steps were not accelerated; None where none was bypassed."""
    return next((row["reason"] for row in status.get("reasons_listed", ()) if row["calls_last"]), None)


def _state(status: Mapping[str, Any]) -> tuple[str, str, str]:
    unserved = status.get("unserved")
    if unserved:
        return "none", "does nothing in this WebUI", f"{unserved}. The WebUI's own code makes every picture."
    missing = status.get("no_gpu")
    if missing:
        return "none", "no supported NVIDIA GPU", f"{missing}. The WebUI's own code makes every picture."
    if not status["enabled"]:
        return "off", "off", "Switched off in Settings > Stable Fast. The WebUI's own code makes every picture."
    preparing = status.get("preparing")
    if preparing:
        text = f"preparing {preparing['label'].partition(',')[0]}"
        return "preparing", text, f"{preparing['label']}: {preparing['stage']}, {preparing['seconds']:.0f} s so far."
    counted = status.get("last_pass") or {}
    reason = _reason(status)
    if counted.get("accelerated"):
        speed = _speed(status)
        if counted.get("bypassed") and reason is not None:
            why = f"{counted['bypassed']} steps of the last picture were not accelerated: {reason}."
            return "partly", f"partly, {speed}", why
        return "on", speed, "The last picture was accelerated."
    if counted.get("bypassed") and reason is not None:
        return "original", f"original: {reason.partition(';')[0]}", f"The last picture was not accelerated: {reason}."
    if counted.get("prepared"):
        return "ready", "prepared", "The next picture of this size is faster."
    return "ready", "ready", "The first picture of a size takes a few seconds longer, the next ones are faster."


def _speed(status: Mapping[str, Any]) -> str:
    """The measured speed-up of the last picture's plan and its pace, as far as they are known."""
    accelerators = [each for each in status["accelerators"] if not each.get("idle") and each.get("steps", True)]
    plan = plan_of_last_picture(accelerators)
    times = plan.get("speedup") if plan is not None else None
    said = [] if times is None else [f"{times:.1f}x"]
    pace = next((each["calls_per_s"] for each in accelerators if each.get("calls_per_s")), None)
    if pace is not None and plan is not None:
        said.append(f"{pace:.0f} it/s" if pace >= 10 else f"{pace:.1f} it/s")
    return ", ".join(said) or "accelerated"
