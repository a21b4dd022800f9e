"""What users do in Forge by lllyasviel, with this checkout beside it and without: the images are compared."""

from __future__ import annotations

from . import forge, test_forge
from .a1111 import TOLERANCE, Round, apart, told

pytestmark = forge.OLD.marks

ONLINE = "lora in the layers"
ONCE_MORE: Round = [
    told("weaker in the layers", "<lora:strong:0.4>"),
    told("two in the layers", "<lora:strong:0.3><lora:second:0.5>"),
    ("none in the layers", "txt2img", test_forge.PLAIN),
]
"""LoRA weakened, with another, and removed, with *fp16 LoRA*: Forge merges it unless the model is quantised."""
ROUND: Round = []
for step in test_forge.ROUND:
    ROUND += [step, *(ONCE_MORE if step[0] == ONLINE else ())]
ROUND += test_forge.freeu(forge.OLD)
BYPASSED = {name: words for name, words in test_forge.BYPASSED.items() if name != ONLINE} | test_forge.BY_FREEU
SAME_PLANS = [*test_forge.SAME_PLANS, "after FreeU"]

globals().update(forge.program_tests(forge.OLD, ROUND, BYPASSED, SAME_PLANS, test_forge.CONTROLLED))


def test_each_lora_in_the_layers_and_freeu_show(stock):
    for name in (ONLINE, "weaker in the layers", "two in the layers"):
        assert apart(stock[name], stock["none in the layers"]) > TOLERANCE, name
    assert apart(stock["FreeU"], stock["after FreeU"]) > TOLERANCE


def test_the_report_has_no_remark(played):
    assert played.webui.get("/sfast/v1/status")["host"]["remarks"] == []
