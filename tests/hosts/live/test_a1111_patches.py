"""What extensions do to AUTOMATIC1111's UNet, by small ones of our own: the image is as they want it.

Each multiplies something by a factor that changes at each step, so that a plan of another step would be seen, and the
report names the function and the extension.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .a1111 import (
    MARKS,
    PLAIN,
    TOLERANCE,
    Round,
    accelerated,
    apart,
    bypassed,
    equal_to_stock,
)
from .webui import add_extension

pytestmark = MARKS

EXTENSION = """
from modules import script_callbacks, scripts, shared

OPTION = "{option}"
FACTOR = 1.0
shared.opts.add_option(OPTION, shared.OptionInfo(False, OPTION, section=("patches", "Patches")))
laid = []


def model():
    return shared.sd_model.model.diffusion_model


def step(params):
    global FACTOR
    FACTOR = 1.0 + {strength} * (1 + params.sampling_step)
    if shared.opts.data.get(OPTION) and {late} and params.sampling_step == 1:
        lay_once()


def lay_once():
    if not laid:
        laid.append(lay(model()))


def take_all():
    while laid:
        take(model(), laid.pop())


{patch}


class Switch(scripts.Script):
    def title(self):
        return OPTION

    def show(self, is_img2img):
        return scripts.AlwaysVisible

    def process(self, p, *args):
        if shared.opts.data.get(OPTION) and not {late}:
            lay_once()

    def postprocess(self, p, processed, *args):
        take_all()


script_callbacks.on_cfg_denoiser(step)
"""

INSTANCE_FORWARD = """
def lay(unet):
    attention = unet.input_blocks[1][1].transformer_blocks[0].attn1
    original = attention.forward

    def guided_forward(*args, **kwargs):
        return original(*args, **kwargs) * FACTOR

    attention.forward = guided_forward
    return attention


def take(unet, attention):
    del attention.forward
"""
INSTANCE_METHOD = INSTANCE_FORWARD.replace(".attn1", "").replace("forward", "_forward").replace("guided_", "guided")
CLASS_METHOD = """
def lay(unet):
    kind = type({module})
    original = kind.{method}

    def scaling_call(self, *args, **kwargs):
        return original(self, *args, **kwargs) * FACTOR

    kind.{method} = scaling_call
    return kind, original


def take(unet, what):
    what[0].{method} = what[1]
"""
HOOK = """
def scaling_hook(module, inputs, output):
    return output * FACTOR


def lay(unet):
    return unet.middle_block.register_forward_hook(scaling_hook)


def take(unet, handle):
    handle.remove()
"""
# as FreeU does: the WebUI's stand-in for torch in ldm's module, and no module of the UNet is touched
TORCH = """
def lay(unet):
    from modules.sd_hijack_unet import th

    original = th.cat

    def weighing_cat(tensors, *args, **kwargs):
        first, *others = tensors
        return original([first * FACTOR, *others], *args, **kwargs)

    th.cat = weighing_cat
    return th


def take(unet, th):
    del th.cat
"""
# as AnimateDiff does
INSERTED = """
import torch


class Motion(torch.nn.Module):
    def forward(self, x):
        return x.roll(int(FACTOR), -1)


def lay(unet):
    unet.input_blocks[1].append(Motion())


def take(unet, nothing):
    del unet.input_blocks[1][-1]
"""
# name of the folder, the patch, the function that the report names, how strong it is, whether it comes in mid-run
PATCHES: list[tuple[str, str, str, float, bool]] = [
    ("attention-guide", INSTANCE_FORWARD, "guided_forward", 50.0, False),
    ("method-guide", INSTANCE_METHOD, "guided_forward", 5.0, False),
    ("block-scaler", CLASS_METHOD.format(module="unet.middle_block[0]", method="_forward"), "scaling_call", 0.4, False),
    (
        "transformer-scaler",
        CLASS_METHOD.format(module="unet.middle_block[1]", method="forward"),
        "scaling_call",
        0.4,
        False,
    ),
    ("model-scaler", CLASS_METHOD.format(module="unet", method="forward"), "scaling_call", 0.1, False),
    ("block-hook", HOOK, "scaling_hook", 20.0, False),
    ("skip-weights", TORCH, "weighing_cat", 0.4, False),
    ("motion-insert", INSERTED, "", 1.0, False),
    ("late-guide", INSTANCE_FORWARD, "guided_forward", 50.0, True),
    ("late-method", INSTANCE_METHOD, "guided_forward", 5.0, True),
    ("late-scaler", CLASS_METHOD.format(module="unet.middle_block[0]", method="_forward"), "scaling_call", 0.4, True),
    ("late-hook", HOOK, "scaling_hook", 20.0, True),
    ("late-weights", TORCH, "weighing_cat", 0.4, True),
    ("very-late-guide", INSTANCE_FORWARD, "guided_forward", 50.0, True),
]
NAMES = [name for name, *_ in PATCHES]
FUNCTIONS = {name: function for name, _, function, _, _ in PATCHES}
LATE = [name for name, *_, late in PATCHES if late]
NAMED = [name for name in FUNCTIONS if name not in LATE and FUNCTIONS[name]]


def option(name: str) -> str:
    return "patch_" + name.replace("-", "_")


def prepare(data: Path) -> None:
    """One extension for each kind of patch; their callbacks come before ours and after."""
    for name, patch, _, strength, late in PATCHES:
        add_extension(data, name, EXTENSION.format(option=option(name), late=late, patch=patch, strength=strength))


PATCHED: dict[str, Any] = {**PLAIN, "steps": 8}  # so that the second, from which the late ones are on, still shows
ROUND: Round = [("plain", "txt2img", PATCHED)]
for each in NAMES:
    ROUND += [
        (f"{each} on", "options", {option(each): True}),
        (each, "txt2img", PATCHED),
        (f"{each} again", "txt2img", PATCHED),
        (f"{each} off", "options", {option(each): False}),
        (f"{each} gone", "txt2img", PATCHED),
    ]


test_image_is_the_one_without_the_extension = equal_to_stock(ROUND)


@pytest.mark.parametrize("name", NAMES)
def test_the_patch_changes_the_image(stock, name):
    assert apart(stock[name], stock["plain"]) > 2 * TOLERANCE
    assert apart(stock[f"{name} gone"], stock["plain"]) < TOLERANCE


@pytest.mark.parametrize("name", NAMED)
def test_the_report_names_the_function_and_its_extension(played, name):
    bypassed(played, name, FUNCTIONS[name])
    assert any(f"of the extension {name}" in reason for reason in played.reasons(name))


@pytest.mark.parametrize("name", LATE)
def test_steps_without_the_patch_are_accelerated(played, name):
    accelerated(played, name)
    assert any(f"of the extension {name}" in reason for reason in played.reasons(name))


@pytest.mark.parametrize("name", NAMES)
def test_plans_run_again_when_it_is_taken_away(played, name):
    accelerated(played, f"{name} gone")
    assert played.reasons(f"{name} gone") == {}
