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

IN_MAKE_TEST = (
    neo.test_its_weights_wait_for_the_first_plan,
    neo.test_it_is_switched_on_after_forge_has_loaded_it,
)
"""Of what Forge Neo's have there as well."""
NEOS = (neo.test_memory_that_forge_has_pinned_is_found, neo.test_all_of_it_is_there_and_another_program_takes_memory)
"""The others pin nothing, and take nothing back from a UNet that is there as a whole."""
OTHERS_TOO = [each for name, each in vars(neo).items() if name.startswith("test_") and each not in NEOS]
pytestmark = [
    pytest.mark.usefixtures("proportions"),
    pytest.mark.long(*(each.__name__ for each in OTHERS_TOO if each not in IN_MAKE_TEST)),
]
globals().update({test.__name__: test for test in OTHERS_TOO})


on = card_with(reforge_memory, forge.ReforgeSession)
