"""What users do in Forge Classic, with this checkout beside it and without: the images are compared."""

from __future__ import annotations

from . import forge, test_forge
from .a1111 import PLAIN, Round, images_of

pytestmark = forge.CLASSIC.marks

HIRES = {**{k: v for k, v in test_forge.HIRES.items() if k != "hr_additional_modules"}, "hr_cfg_scale": 7.0}
MISSING = ("Automatic (fp16 LoRA)", "lora in the layers", "float8-e4m3fn", "in eight bits", "Automatic and", "refiner")
"""The beginnings of steps of Forge Neo's round that it has nothing for."""
OTHER_HIRES = {"hires": HIRES, "another for hires": {**HIRES, "hr_checkpoint_name": "other.safetensors"}}
# weak ones: Forge Classic adds the second pass's to the first's, and stronger ones make of rounding another image
WEAK = {"prompt": f"{PLAIN['prompt']} <lora:strong:0.2>", "hr_prompt": "a dog <lora:second:0.2>"}
OTHER_HIRES["another lora for hires"] = {**HIRES, **WEAK}
ROUND: Round = [
    (name, route, OTHER_HIRES.get(name, payload))
    for name, route, payload in test_forge.ROUND
    if not name.startswith(MISSING)
]
BYPASSED = {name: words for name, words in test_forge.BYPASSED.items() if name in images_of(ROUND)}
SAME_PLANS = [name for name in test_forge.SAME_PLANS if name in images_of(ROUND)]

globals().update(forge.program_tests(forge.CLASSIC, ROUND, BYPASSED, SAME_PLANS, test_forge.CONTROLLED))
