"""What users do in reForge, with this checkout beside it and without: the images are compared."""

from __future__ import annotations

from . import forge, test_forge, test_forge_classic
from . import test_a1111_requests as requests
from .a1111 import TOLERANCE, Round, apart, equal_to_stock, pictured

pytestmark = forge.REFORGE.marks

MISSING = tuple(name for name in test_forge_classic.MISSING if name != "refiner")
ROUND: Round = [
    (name, route, test_forge_classic.OTHER_HIRES.get(name, payload))
    for name, route, payload in test_forge.ROUND
    if not name.startswith(MISSING)
]
BYPASSED = {name: words for name, words in test_forge.BYPASSED.items() if name in pictured(ROUND)}
TAKEN_APART = ("other", "refiner")
"""Images of a checkpoint before which reForge took the model with the plans to pieces: they need new plans."""
SAME_PLANS = [name for name in test_forge.SAME_PLANS if name in pictured(ROUND) and name not in TAKEN_APART]


data, stock, played = forge.fixtures(forge.REFORGE, ROUND)
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
    assert status["host"]["name"] == "reForge" and status["host"]["remarks"] == [] and status["last_error"] is None
