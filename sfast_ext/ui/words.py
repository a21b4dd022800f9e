"""What is said to people who make images: sizes instead of shapes, and the state in a few words.

Text here is ASCII, as all that may reach a console; the page writes "x" between numbers as a multiplication sign.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from sfast_ext.reasons import BREAK, Reason

PIXELS = 8
"""Pixels of an image for each of its latent, along a side: that of every VAE of SD 1, 2 and XL."""
LATENT_CHANNELS = 16
"""No latent has more channels; feature maps inside the network do."""
COUNTED, CHUNK = 75, 77
"""Tokens of a chunk of a prompt: by the WebUI's counter, and with the start and the end that the model gets."""


def size_words(shapes: Sequence[tuple[int, ...]], images: int | None = None) -> str | None:
    """A call of the UNet in a user's words, such as "512x512, 1 image, 77 tokens"; None if it is no such call.

    Args:
        shapes: of the tensors among its arguments.
        images: how many are made at once, if the host says so: with guidance a call has two rows for each.
    """
    latent = latent_of(shapes)
    if latent is None or latent[1] > LATENT_CHANNELS:
        return None
    rows, height, width = latent[0], *latent[-2:]
    said = [f"{width * PIXELS}x{height * PIXELS}"]
    if images is not None and images > 0 and rows % images == 0:
        said.append("1 image" if images == 1 else f"{images} images")
    else:
        said.append(f"batch {rows}")
    prompt = next((shape for shape in shapes if len(shape) == 3), None)
    if prompt is not None:
        said.append(f"{prompt[1]} tokens")
    return ", ".join(said)


def latent_of(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The latent among the shapes of a call's arguments: the first of images, or of frames as Anima's is."""
    return next((shape for shape in shapes if len(shape) in (4, 5)), None)


def upscaler_words(shapes: Sequence[tuple[int, ...]]) -> str | None:
    """A call of an upscaler in a user's words, such as "upscaler, 192x192"; None if it is no such call."""
    given = next((shape for shape in shapes if len(shape) == 4), None)
    return None if given is None else f"upscaler, {given[3]}x{given[2]}"


def preview_words(shapes: Sequence[tuple[int, ...]]) -> str | None:
    """A call of a decoder of previews in a user's words, such as "preview, 512x512"; None if it is no such call."""
    given = next((shape for shape in shapes if len(shape) == 4), None)
    return None if given is None else f"preview, {given[3] * PIXELS}x{given[2] * PIXELS}"


def vae_words(part: str, shapes: Sequence[tuple[int, ...]]) -> str | None:
    """A call of a part of a VAE in a user's words, such as "VAE decoder, 512x512"; None if it is no such call.

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
    return said if rows == 1 else f"{said}, {rows} images"


def text_words(shapes: Sequence[tuple[int, ...]]) -> str | None:
    """A call of a text encoder in a user's words, such as "text encoder, 77 tokens, 2 prompts"; None if it is none.

    Args:
        shapes: of the tensors among its arguments: the embeddings of tokens, or their numbers, and masks.
    """
    given = next((shape for n in (3, 2) for shape in shapes if len(shape) == n), None)
    if given is None:
        return None
    rows, tokens = given[:2]
    mask = next((shape for shape in shapes if len(shape) in (2, 4) and shape[-1] == shape[-2]), None)
    if mask is not None and len(given) == 3 and tokens != mask[-1]:
        # OpenCLIP's blocks have the tokens in front
        rows, tokens = tokens, rows
    said = f"text encoder, {tokens} tokens"
    return said if rows == 1 else f"{said}, {rows} prompts"


def images_of(label: str, shapes: Sequence[tuple[int, ...]]) -> int | None:
    """How many images a label of `size_words` for these shapes is of; None if it does not say."""
    latent = latent_of(shapes)
    rows = 0 if latent is None else latent[0]
    return next((n for n in range(1, rows + 1) if rows % n == 0 and size_words(shapes, n) == label), None)


def plan_words(plan: Mapping[str, Any], unit: str = "step") -> str:
    """A plan in one line: "512x512, 1 image, 77 tokens: 2.1x (31.0 -> 14.8 ms a step)".

    Args:
        unit: what one call of it is.
    """
    times = plan.get("speedup")
    if times is None:
        return f"{plan['label']}: not compared in time"
    return f"{plan['label']}: {times:.1f}x ({plan['ms_before']:.1f} -> {plan['ms_after']:.1f} ms a {unit})"


def plan_of_last_image(accelerators: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Of the plans that the last image used, by the status of accelerators, the one with the most steps. Those of
    networks whose calls are no steps do not count."""
    of_steps = (each for each in accelerators if each.get("steps", True))
    plans = [plan for each in of_steps for plan in each.get("plans", ()) if plan.get("last_pass")]
    return max(plans, key=lambda plan: plan["replays"], default=None)


def badge(status: Mapping[str, Any]) -> dict[str, Any]:
    """The state in a word, a few words for the badge, a sentence for its details, both with their pieces (see
    `Reason.pieces`), and the entry of the help on what to do about it; None if there is nothing to do. The same of a
    note on what the user should know; None if there is none.

    Args:
        status: of the session. `unserved` and `no_gpu` are reasons here.
    """
    state, text, detail = _state(status)
    none, row = status.get("unserved") or status.get("no_gpu"), _main_reason(status)
    code = {"none": none and none.code, "original": row and row["code"], "partly": row and row["code"]}.get(state)
    found = {"state": state, "text": "".join(text), "detail": "".join(detail), "help": code}
    told = {} if state in ("none", "off") else status.get("eight_bits") or {}
    note = {"note": told.get("note"), "note_parts": told.get("note_parts", []), "note_help": told.get("help")}
    done = _done(status["preparing"]) if state == "preparing" else None
    return {**found, "text_parts": text, "detail_parts": detail, **note, "progress": done}


def _done(preparing: Mapping[str, Any]) -> float | None:
    """Which part of a preparation is over, as the last one took; None if that is not known."""
    seconds, left = preparing["seconds"], preparing.get("seconds_left")
    return None if left is None or seconds + left <= 0 else round(seconds / (seconds + left), 2)


def _main_reason(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Why most of the last image's steps were not accelerated; None if none was bypassed."""
    return next((row for row in status.get("reasons_listed", ()) if row["calls_last"]), None)


_ORIGINAL = "The WebUI's own code makes every image."


def _state(status: Mapping[str, Any]) -> tuple[str, list[str], list[str]]:
    none: Reason | None = status.get("unserved") or status.get("no_gpu")
    if none is not None:
        text = "does nothing in this WebUI" if status.get("unserved") else "no supported NVIDIA GPU"
        return "none", [text], [*none.pieces(), ". ", _ORIGINAL]
    if not status["enabled"]:
        return "off", ["off"], ["Switched off in Settings > Stable Fast", ". ", _ORIGINAL]
    preparing = status.get("preparing")
    if preparing:
        label = [part for word in preparing["label"].split(" ") for part in (word, " ")][:-1]
        seconds, left = f"{preparing['seconds']:.0f}", preparing.get("seconds_left")
        rest = [] if left is None else [", ", f"{left:.0f}", " ", "s left"]
        detail = [*label, ": ", preparing["stage"], ", ", seconds, " ", "s so far", *rest, "."]
        return "preparing", ["preparing", " ", label[0].rstrip(","), *rest], detail
    counted = status.get("last_pass") or {}
    row = _main_reason(status)
    why = [] if row is None else [*row["reason_parts"], "."]
    if counted.get("accelerated"):
        plan = plan_of_last_image(status["accelerators"]) or {}
        fused = plan.get("fused", {})
        coarse = fused.get("eight_bits") or fused.get("eight_bits_conv")
        speed = [_speed(status), *([", ", "8 bits"] if coarse else [])]
        if counted.get("bypassed") and why:
            steps = [str(counted["bypassed"]), " ", "steps of the last image were not accelerated:", " "]
            return "partly", ["partly,", " ", *speed], [*steps, *why]
        return "on", speed, ["The last image was accelerated", "."]
    if counted.get("bypassed") and why:
        short = itertools.takewhile(lambda piece: piece != BREAK, why[:-1])
        return "original", ["original:", " ", *short], ["The last image was not accelerated:", " ", *why]
    if counted.get("prepared"):
        return "ready", ["prepared"], ["The next image of this size is faster", "."]
    later = "The second image of a size takes a few seconds longer, the next ones are faster"
    return "ready", ["ready"], [later, "."]


def _speed(status: Mapping[str, Any]) -> str:
    """The measured speed-up of the last image's plan and its pace, as far as they are known."""
    accelerators = [each for each in status["accelerators"] if not each.get("idle") and each.get("steps", True)]
    plan = plan_of_last_image(accelerators)
    times = plan.get("speedup") if plan is not None else None
    said = [] if times is None else [f"{times:.1f}x"]
    pace = next((each["calls_per_s"] for each in accelerators if each.get("calls_per_s")), None)
    if pace is not None and plan is not None:
        said.append(f"{pace:.0f} it/s" if pace >= 10 else f"{pace:.1f} it/s")
    return ", ".join(said) or "accelerated"
