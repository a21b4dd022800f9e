"""The text encoders of AUTOMATIC1111 with this checkout beside it and without: what a prompt may have, and LoRAs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .a1111 import (
    HIRES,
    MARKS,
    PLAIN,
    TOLERANCE,
    Played,
    Round,
    apart,
    count,
    equal_to_stock,
    play,
)
from .a1111_xl import REGISTER, WIDTH
from .webui import add_extension

pytestmark = MARKS
SETTINGS = {"sd_vae": "None", "sd_checkpoints_limit": 1, "sd_checkpoints_keep_in_cpu": True}
LONG = " ".join(str(i * i % 7) for i in range(300))
"""Of so many tokens for both tokenizers: the tiny one knows single bytes only, and SDXL joins what they give."""


def text_lora(prefix: str, seed: int, inner: int) -> dict[str, torch.Tensor]:
    """A LoRA on all linear layers of a text model of two layers."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {f"self_attn_{part}": (WIDTH, WIDTH) for part in ("q_proj", "k_proj", "v_proj", "out_proj")}
    sizes |= {"mlp_fc1": (inner, WIDTH), "mlp_fc2": (WIDTH, inner)}
    tensors = {}
    for layer in (0, 1):
        for part, (out, into) in sizes.items():
            key = f"{prefix}_text_model_encoder_layers_{layer}_{part}"
            tensors[f"{key}.lora_down.weight"] = torch.randn((4, into), generator=generator) * into**-0.5
            tensors[f"{key}.lora_up.weight"] = torch.randn((out, 4), generator=generator) * 0.5
            tensors[f"{key}.alpha"] = torch.tensor(4.0)
    return tensors


def prepare(data: Path) -> None:
    """What tells open_clip of the small text model, and LoRAs on text models alone."""
    from safetensors.torch import save_file

    add_extension(data, "tiny-text", REGISTER)
    folder = data / "models" / "Lora"
    save_file(text_lora("lora_te", 1, 2 * WIDTH), folder / "words.safetensors")
    save_file(text_lora("lora_te", 2, 4 * WIDTH), folder / "words-second.safetensors")
    both = {**text_lora("lora_te1", 3, 2 * WIDTH), **text_lora("lora_te2", 4, 4 * WIDTH)}
    save_file(both, folder / "words-xl.safetensors")


def say(name: str, prompt: str, **more: Any) -> tuple[str, str, dict[str, Any]]:
    """An image of another prompt; the negative one is what the WebUI has kept."""
    return name, "txt2img", {**PLAIN, "prompt": prompt, **more}


def to(checkpoint: str) -> tuple[str, str, dict[str, str]]:
    return f"to {checkpoint}", "options", {"sd_model_checkpoint": checkpoint}


def skip(layers: int, again: str = "") -> tuple[str, str, dict[str, int]]:
    return f"to skip {layers}{again}", "options", {"CLIP_stop_at_last_layers": layers}


def prompts(model: str, lora: str) -> Round:
    return [
        say(f"{model} one", "a dog on a hill"),
        say(f"{model} two", "a ship at sea"),
        say(f"{model} three", "a house by a lake"),
        say(f"{model} emphasis", "a (house:1.4) by a [lake]"),
        say(f"{model} LoRA", f"a house by a lake <lora:{lora}:1>"),
        say(f"{model} LoRA, less", f"a house by a lake <lora:{lora}:0.5>"),
        say(f"{model} LoRA gone", "a house by a river"),
        say(f"{model} 300 tokens", LONG),
        say(f"{model} 300 tokens again", LONG[::-1]),
        say(f"{model} editing", "a [dog:ship:2] on a hill"),
        say(f"{model} editing again", "a [cat:ship:2] on a hill"),
        say(f"{model} editing with LoRA", f"a [cat:house:2] on a hill <lora:{lora}:-1>"),
        say(f"{model} BREAK", "a dog BREAK on a hill"),
        say(f"{model} AND", "a dog AND a lake"),
        (f"{model} hires", "txt2img", {**HIRES, "prompt": "a cliff", "hr_prompt": "a cliff and a ship"}),
    ]


ROUND: Round = [
    *prompts("tiny", "words"),
    say("textual inversion", "a tinyword on a hill"),
    say("textual inversion elsewhere", "a hill, tinyword, and (tinyword:1.3)"),
    say("textual inversion of another prompt", "a boat, tinyword"),
    say("textual inversion, 300 tokens", f"{LONG} tinyword"),
    skip(2),
    say("skip 2", "a dog on a hill"),
    say("skip 2 again", "a ship at sea"),
    say("skip 2 once more", "a tinyword at sea"),
    skip(3),
    say("skip 3", "a dog on a hill"),
    say("skip 3 again", "a ship at sea"),
    say("skip 3 once more", "a house at sea <lora:words:1>"),
    skip(1),
    say("skip 1", "a house at sea <lora:words:1>"),
    ("to no norm", "options", {"emphasis": "No norm"}),
    say("no norm", "a (dog:1.5) on a (hill:0.3)"),
    ("to original", "options", {"emphasis": "Original"}),
    to("tiny.ckpt"),
    say("same architecture", "a dog on a hill"),
    say("same architecture again", "a ship on a hill"),
    to("second.safetensors"),
    *prompts("second", "words-second"),
    to("xl.safetensors"),
    *prompts("xl", "words-xl"),
    skip(2, " with XL"),
    say("xl, skip 2", "a dog on a hill"),
    ("to XL's skip", "options", {"sdxl_clip_l_skip": True}),
    say("xl, skip 2 of L", "a dog on the hill"),
    skip(1, " after XL"),
    to("tiny.safetensors"),
    say("back", "a ship on a hill"),
]
BY_PLANS = [
    "tiny three", "tiny emphasis", "tiny LoRA", "tiny LoRA, less", "tiny LoRA gone", "tiny 300 tokens",
    "tiny editing with LoRA", "tiny BREAK", "tiny AND", "tiny hires", "textual inversion",
    "textual inversion of another prompt", "textual inversion, 300 tokens", "skip 2 once more", "skip 3 once more",
    "skip 1", "no norm", "second three", "second LoRA", "second LoRA gone", "second 300 tokens",
    "second editing with LoRA", "xl three", "xl LoRA", "xl LoRA gone", "xl 300 tokens", "xl editing with LoRA",
    "same architecture again", "back",
]  # fmt: skip

test_image_is_the_one_without_the_extension = equal_to_stock(ROUND)


@pytest.mark.parametrize("name", BY_PLANS)
def test_its_prompt_was_read_by_a_plan(played: Played, name: str) -> None:
    report = played.reports[name]
    assert count(report, "text_eager_runs") + count(report, "text_replays") > sum(
        count(played.before(name), counter) for counter in ("text_eager_runs", "text_replays")
    ), (report["counters"], report["events"][-6:])
    assert report["last_error"] is None


def test_nothing_was_bypassed(played: Played) -> None:
    last = list(played.reports.values())[-1]
    assert not count(last, "text_fallbacks"), [each for each in last["events"] if each["stage"] == "bypassed"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("tiny LoRA", "tiny three"), ("tiny LoRA", "tiny LoRA, less"), ("tiny emphasis", "tiny three"),
        ("textual inversion", "tiny one"), ("skip 2", "tiny one"), ("skip 3", "skip 2"), ("tiny two", "tiny one"),
        ("second LoRA", "second three"), ("xl LoRA", "xl three"), ("second two", "second one"), ("xl two", "xl one"),
    ],
)  # fmt: skip
def test_the_round_tells_its_images_apart(stock: dict[str, list[str]], one: str, other: str) -> None:
    assert apart(stock[one], stock[other]) > 2 * TOLERANCE


def test_the_status_names_its_plans(played: Played) -> None:
    found = [each for each in played.reports["xl three"]["accelerators"] if each["name"] == "text encoder"]
    assert len(found) == 2 and all(each["plans"] for each in found)
    assert {"text encoder, 77 tokens"} <= {plan["label"] for each in found for plan in each["plans"]}


def test_what_is_said_of_the_steps_does_not_count_the_text_encoders(played: Played) -> None:
    report = played.reports["tiny three"]
    assert report["last_pass"]["accelerated"] and not report["last_pass"]["bypassed"]


def test_unticking_it_gives_them_back_and_leaves_the_steps_accelerated(played: Played) -> None:
    webui = played.webui
    play(webui, "options", {"sfast_text_encoders": False})
    before = webui.get("/sfast/v1/status")
    play(webui, *say("off", "a garden")[1:])
    after = webui.get("/sfast/v1/status")
    assert count(after, "text_eager_runs") == count(before, "text_eager_runs")
    assert count(after, "plans run") > count(before, "plans run")
    assert not any(each["name"] == "text encoder" for each in after["accelerators"])
    play(webui, "options", {"sfast_text_encoders": True})
