"""What users do in reForge, with this checkout beside it and without: the images are compared."""

from __future__ import annotations

from . import forge, test_forge, test_forge_classic
from .a1111 import TOLERANCE, Round, apart, images_of

pytestmark = forge.REFORGE.marks

MISSING = tuple(name for name in test_forge_classic.MISSING if name != "refiner")
ROUND: Round = [
    (name, route, test_forge_classic.OTHER_HIRES.get(name, payload))
    for name, route, payload in test_forge.ROUND
    if not name.startswith(MISSING)
] + test_forge.freeu(forge.REFORGE)
BYPASSED = {name: why for name, why in test_forge.BYPASSED.items() if name in images_of(ROUND)} | test_forge.BY_FREEU
TAKEN_APART = ("other", "refiner", "another lora for hires")
"""Images of a checkpoint before which reForge took the model with the plans to pieces: they need new plans."""
SAME_PLANS = [name for name in test_forge.SAME_PLANS if name in images_of(ROUND) and name not in TAKEN_APART]
SAME_PLANS.append("after FreeU")

globals().update(forge.program_tests(forge.REFORGE, ROUND, BYPASSED, SAME_PLANS, test_forge.CONTROLLED))


def test_the_report_has_no_remark(played):
    assert played.webui.get("/sfast/v1/status")["host"]["remarks"] == []


def test_freeu_shows(stock):
    assert apart(stock["FreeU"], stock["after FreeU"]) > TOLERANCE
