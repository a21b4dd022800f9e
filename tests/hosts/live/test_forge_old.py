"""What users do in Forge by lllyasviel, with this checkout beside it and without: the images are compared."""

from __future__ import annotations

from . import forge, test_forge
from . import test_a1111_requests as requests
from .a1111 import TOLERANCE, Round, apart, equal_to_stock, told

pytestmark = forge.OLD.marks

ONLINE = "lora in the layers"
AGAIN: Round = [
    told("weaker in the layers", "<lora:strong:0.4>"),
    told("two in the layers", "<lora:strong:0.3><lora:second:0.5>"),
    ("none in the layers", "txt2img", test_forge.PLAIN),
]
"""LoRA weakened, with another, and removed, with *fp16 LoRA*: Forge merges it unless the model is quantised."""
ROUND: Round = []
for step in test_forge.ROUND:
    ROUND += [step, *(AGAIN if step[0] == ONLINE else ())]
BYPASSED = {name: words for name, words in test_forge.BYPASSED.items() if name != ONLINE}


data, stock, played = forge.fixtures(forge.OLD, ROUND)
test_picture_is_the_one_without_the_extension = equal_to_stock(ROUND)
(
    test_plans_were_run,
    test_no_new_capture_for,
    test_the_original_forward_runs_and_the_report_says_why,
) = forge.round_tests(ROUND, BYPASSED, test_forge.SAME_PLANS)
test_after_an_interruption_the_next_picture_is_right = requests.test_after_an_interruption_the_next_picture_is_right
test_two_requests_at_once_give_both_pictures = requests.test_two_requests_at_once_give_both_pictures
test_the_vae_and_controlnets_are_accelerated = forge.beside_test(test_forge.CONTROLLED)


def test_the_round_shows_what_it_should(stock):
    changed = ("lora", "lora weaker", "two loras", "other", "three", "token merging", *test_forge.CONTROLLED)
    for name in changed:
        assert apart(stock[name][:1], stock["plain"]) > TOLERANCE, name
    for name in ("lora gone", "plain after loras", "one again", "without controlnet", "plain at the end"):
        assert apart(stock[name], stock["plain"]) < TOLERANCE, name
    for name in (ONLINE, "weaker in the layers", "two in the layers"):
        assert apart(stock[name], stock["none in the layers"]) > TOLERANCE, name


def test_switched_off_the_bytes_are_the_webui_s_own(played, stock):
    forge.as_its_own(played, stock)
    status = played.webui.get("/sfast/v1/status")
    assert status["host"]["name"] == "Forge" and status["host"]["remarks"] == [] and status["last_error"] is None
