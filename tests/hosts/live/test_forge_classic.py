"""What users do in Forge Classic, with this checkout beside it and without: the pictures are compared."""

from __future__ import annotations

from . import forge, test_forge
from . import test_a1111_requests as requests
from .a1111 import PLAIN, TOLERANCE, Round, apart, equal_to_stock, pictured

pytestmark = forge.CLASSIC.marks

HIRES = {**{k: v for k, v in test_forge.HIRES.items() if k != "hr_additional_modules"}, "hr_cfg_scale": 7.0}
MISSING = ("Automatic (fp16 LoRA)", "lora in the layers", "float8-e4m3fn", "in eight bits", "Automatic and", "refiner")
"""The beginnings of steps of Forge Neo's round that it has nothing for."""
OTHER_HIRES = {"hires": HIRES, "another for hires": {**HIRES, "hr_checkpoint_name": "other.safetensors"}}
# weak ones: Forge Classic adds the second pass's to the first's, and stronger ones make of rounding another picture
WEAK = {"prompt": f"{PLAIN['prompt']} <lora:strong:0.2>", "hr_prompt": "a dog <lora:second:0.2>"}
OTHER_HIRES["another lora for hires"] = {**HIRES, **WEAK}
ROUND: Round = [
    (name, route, OTHER_HIRES.get(name, payload))
    for name, route, payload in test_forge.ROUND
    if not name.startswith(MISSING)
]
BYPASSED = {name: words for name, words in test_forge.BYPASSED.items() if name in pictured(ROUND)}
SAME_PLANS = [name for name in test_forge.SAME_PLANS if name in pictured(ROUND)]


data, stock, played = forge.fixtures(forge.CLASSIC, ROUND)
test_picture_is_the_one_without_the_extension = equal_to_stock(ROUND)
(
    test_plans_were_run,
    test_no_new_capture_for,
    test_the_original_forward_runs_and_the_report_says_why,
) = forge.round_tests(ROUND, BYPASSED, SAME_PLANS)
test_after_an_interruption_the_next_picture_is_right = requests.test_after_an_interruption_the_next_picture_is_right
test_two_requests_at_once_give_both_pictures = requests.test_two_requests_at_once_give_both_pictures
test_the_vae_and_controlnets_are_accelerated = forge.beside_test(test_forge.CONTROLLED)


def test_the_round_shows_what_it_should(stock):
    for name in ("lora", "lora weaker", "two loras", "other", "three", "token merging", *test_forge.CONTROLLED):
        assert apart(stock[name][:1], stock["plain"]) > TOLERANCE, name
    for name in ("lora gone", "plain after loras", "one again", "without controlnet", "plain at the end"):
        assert apart(stock[name], stock["plain"]) < TOLERANCE, name


def test_switched_off_the_bytes_are_the_webui_s_own(played, stock):
    forge.as_its_own(played, stock)
    status = played.webui.get("/sfast/v1/status")
    assert status["host"]["name"] == "Forge Classic" and status["last_error"] is None
