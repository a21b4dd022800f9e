"""LoRA in a UNet that Forge Neo loads in parts, when it had been loaded as a whole with 8 bits."""

from __future__ import annotations

import pytest

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from hosts.adapters.test_forge_resident import SIZE, Running, on, room  # noqa: F401
from hosts.standins.forge_neo_patcher import ModelPatcher
from sfast_ext.hosts.forge import adapter as forge

pytestmark = pytest.mark.usefixtures("proportions")


@room(1.6)
def test_a_lora_is_right_after_the_extension_was_turned_off(on: Running) -> None:  # noqa: F811
    on.lora(a=-1.0)
    assert on.picture(3, 12) < 0.06
    on.host.opts.data["sfast_enabled"] = False
    # in the second one Forge finds more memory, which plans had
    for _ in range(3):
        assert on.picture() < 1e-2 and on.model.model_lowvram


@room(1.6)
def test_a_lora_is_right_after_forge_had_to_load_in_parts(on: Running) -> None:  # noqa: F811
    on.lora(a=-1.0)
    assert on.picture() < 0.06 and on.picture() < 0.06
    # another program takes memory, and an extension's hook keeps plans from running
    on.card.outside = int(0.7 * SIZE)
    on.host.unet.middle_block.register_forward_hook(lambda module, given, result: result)
    assert on.picture() < 0.06 and on.model.model_lowvram
    on.card.outside = int(0.68 * SIZE)
    assert on.picture() < 0.06 and on.model.model_lowvram


@pytest.mark.parametrize("mended", [False, True])
@pytest.mark.parametrize("online", [False, True])
@room(1.6)
def test_forges_own_fault(
    on: Running,  # noqa: F811
    online: bool,
    mended: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forge.ForgeSession.stop()
    monkeypatch.setattr(ModelPatcher, "MENDED", mended)
    on.lora(online=online, a=-1.0)
    assert on.picture() == 0 and on.model.model_lowvram
    # another program takes 2 % less
    on.card.outside = int(-0.02 * SIZE)
    assert (on.picture() > 0.1) != mended and on.model.model_lowvram
