"""reForge with 8 bits on a small card: in the first image too, half-precision weights of layers stay in system memory.
What Forge Neo's tests do."""

from __future__ import annotations

import pytest

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from hosts.adapters import test_forge_resident_first as neo
from hosts.adapters.resident_forge import card_with
from hosts.adapters.test_forge_resident_first import lean, told  # noqa: F401
from hosts.standins import reforge_memory
from sfast_ext.hosts.forge import adapter as forge

TESTS, pytestmark = neo.for_others(
    neo.test_its_weights_wait_for_the_first_plan,
    neo.test_it_is_switched_on_after_forge_has_loaded_it,
)
globals().update(TESTS)


on = card_with(reforge_memory, forge.ReforgeSession)
