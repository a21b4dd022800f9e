"""What a UNet that Forge by lllyasviel loads with 8 bits takes of system memory: as in Forge Neo."""

from __future__ import annotations

import pytest

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from hosts.adapters import test_forge_resident_memory
from hosts.adapters.test_forge_old_resident import on  # noqa: F401
from hosts.adapters.test_forge_resident_memory import others  # noqa: F401

pytestmark = [
    pytest.mark.usefixtures("proportions"),
    pytest.mark.long("test_while_it_is_on"),
    pytest.mark.long("test_after_it_was_turned_off", but=[0]),
]
test_while_it_is_on = test_forge_resident_memory.test_while_it_is_on
test_after_it_was_turned_off = test_forge_resident_memory.test_after_it_was_turned_off
