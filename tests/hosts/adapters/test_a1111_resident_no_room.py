"""AUTOMATIC1111 without `--medvram`, after 8 bits on a small card: another program has the memory that half-precision
weights need. Images are made all the same."""

from __future__ import annotations

import pytest

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from hosts.adapters.test_a1111_resident import NONE, Running, on  # noqa: F401
from sfast_ext import accelerator_of

pytestmark = pytest.mark.usefixtures("proportions")


@pytest.mark.parametrize("on", [(NONE, 2.1)], indirect=True)
def test_it_is_switched_off_and_on_without_room_for_the_weights(on: Running) -> None:  # noqa: F811
    assert on.image(3) < 0.06 and on.away
    missing = sum(p.nbytes for p in on.unet.parameters() if not p.is_cuda)
    away, report = on.away, on.session.report
    # once 8-bit weights are gone, there is room for most of these
    stays = on.card.allocated - on.accelerator.arena.banks.held
    on.card.outside = int(on.card.capacity - stays - 0.95 * missing)
    on.host.opts.data["sfast_enabled"] = False
    assert on.image(1) < 1e-3 and on.away == away and not on.session.attachments[0].accelerators()
    on.host.opts.data["sfast_enabled"] = True
    assert on.image(1) < 1e-3 and on.away == away
    said = str([event["message"] for event in report.as_dict()["events"]])
    assert said.count("no room for half-precision weights") == 1 and report.counter("errors") == 0, said
    on.host.opts.data["sfast_enabled"] = False
    on.card.outside = 0
    assert on.image(1) < 1e-3 and not on.away
    assert accelerator_of(on.unet) is None and "forward" not in vars(on.unet)
