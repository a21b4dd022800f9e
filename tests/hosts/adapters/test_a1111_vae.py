"""The VAE in AUTOMATIC1111, against the stand-in around ldm's own: images are those of an untouched twin."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("ldm.modules.diffusionmodules.model", reason="needs stable-diffusion-sdkit without its pins")
from passes.support import HALF_ON_THE_CPU

from hosts.standins import a1111 as standin
from hosts.standins import a1111_vae as vaes
from sfast_ext import accelerator_of
from sfast_ext.hooks import Hooks
from sfast_ext.hosts import gpu_room, vae_memory
from sfast_ext.hosts import vae as hosts_vae
from sfast_ext.hosts.a1111 import adapter as a1111
from sfast_ext.report import Report
from sfast_ext.ui.settings_table import HostConfig

pytestmark = pytest.mark.usefixtures("vae_plans_at_once")

LATENT = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(7))
WIDE = torch.randn((1, 4, 8, 12), generator=torch.Generator().manual_seed(8))


class Running:
    """The host with the extension, a model, and an untouched twin of its VAE."""

    def __init__(self, host: Any) -> None:
        self.host = host
        a1111.start("test")
        self.model = host.load(1)
        self.vae = self.model.first_stage_model = vaes.make_vae(2)
        self.twin = SimpleNamespace(first_stage_model=vaes.make_vae(2))
        host.fire("model_loaded", self.model)

    @property
    def session(self) -> Any:
        return a1111.A1111Session.running

    def counter(self, name: str) -> int:
        return self.session.report.counter(name)

    def status(self) -> dict[str, Any]:
        """That of the decoder's accelerator."""
        return next(each for each in self.session.status()["accelerators"] if each["name"] == "VAE decoder")

    def decode(self, latent: torch.Tensor = LATENT) -> str:
        """Decodes as the host does and compares. What it was: "original", "prepared", "plan"."""
        return self._did(lambda model: vaes.decode(model, latent))

    def encode(self) -> str:
        image = torch.randn((1, 3, 32, 32), generator=torch.Generator().manual_seed(9))
        return self._did(lambda model: vaes.encode(model, image))

    def _did(self, action: Any) -> str:
        names = {"vae_captures": "prepared", "vae_eager_runs": "plan"}
        before = {name: self.counter(name) for name in names}
        found, expected = action(self.model), action(self.twin)
        rounding = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}[self.vae.dtype]
        assert float((found - expected).norm() / expected.norm()) < rounding
        return next((what for name, what in names.items() if self.counter(name) > before[name]), "original")

    def image(self) -> str:
        """An image: steps, then its decoding."""
        self.host.generate()
        return self.decode()


@pytest.fixture
def on() -> Iterator[Running]:
    with standin.running(sfast_allow_cpu=True) as host:
        on = Running(host)
        yield on
        a1111.A1111Session.stop()
        assert host.errors == []
        assert accelerator_of(on.vae.decoder) is None and "forward" not in vars(on.vae.encoder)


def test_the_second_image_of_a_size_prepares_and_the_third_is_decoded_by_a_plan(on):
    assert [on.image() for _ in range(4)] == ["original", "prepared", "plan", "plan"]
    found = on.status()
    assert found["plans"][0]["label"] == "VAE decoder, 64x64" and found["plans"][0]["fused"]["silu"] == 17
    assert found["idle"] is None and found["module"] == "Decoder"


def test_what_frees_the_cache_of_a_small_card_is_no_patch(on, monkeypatch):
    monkeypatch.setattr(vae_memory.gpu_room, "is_tight", lambda: True)
    watched = vae_memory.VaeMemory(lambda needed, in_one: None)
    watched.watch([on.vae])
    hooks = [hook for m in on.vae.decoder.modules() for hook in m._forward_pre_hooks.values()]
    assert any(isinstance(hook, vae_memory.FreeCached) for hook in hooks)
    assert [on.image() for _ in range(3)] == ["original", "prepared", "plan"]
    watched.release()
    # another hook there is one
    handle = on.vae.decoder.up[0].block[0].register_forward_pre_hook(lambda module, args: None)
    assert [on.image() for _ in range(3)] == ["original"] * 3
    handle.remove()


def test_img2img_encodes_by_a_plan_and_draws_as_it_did(on):
    assert [on.encode() for _ in range(4)] == ["original", "prepared", "plan", "plan"]


def test_each_of_a_batch_is_decoded_alone_by_one_plan(on):
    batch = torch.cat([LATENT, 2 * LATENT, -LATENT])
    assert on.decode(batch) == "prepared"
    assert on.decode(batch) == "plan" and on.counter("vae_captures") == 1


def test_what_is_said_of_the_steps_does_not_count_the_vae(on):
    for _ in range(3):
        on.image()
    status = on.session.status()
    # three steps of each image
    assert status["last_pass"] == {"accelerated": 3, "bypassed": 0, "prepared": 0}
    assert status["badge"]["state"] == "on"
    assert status["counters"]["captures"] == 1 and status["counters"]["vae_captures"] == 1
    assert {each["name"]: each.get("steps", True) for each in status["accelerators"]} == {
        "unet": True, "VAE decoder": False, "VAE encoder": False,
    }  # fmt: skip


def test_switched_off_it_is_released_before_the_next_image_and_back_on_it_starts_anew(on):
    for _ in range(3):
        on.image()
    on.host.opts.data["sfast_vae"] = False
    on.host.request()
    assert accelerator_of(on.vae.decoder) is None and on.decode() == "original"
    assert on.session.loaded() is not None
    on.host.opts.data["sfast_vae"] = True
    on.host.request()
    assert [on.decode() for _ in range(3)] == ["original", "prepared", "plan"]


def test_its_sums_stay_in_full_precision_whatever_the_steps_have(on):
    on.host.opts.data.update(sfast_faster_sums=True, sfast_eight_bits=True)
    on.host.request()
    ours = accelerator_of(on.vae.decoder)
    assert on.session.loaded().config.faster_sums and not ours.config.faster_sums
    assert on.session.loaded().config.eight_bits and not ours.config.eight_bits
    assert not ours.config.cuda_graphs and ours.config.rare_calls and ours.config.max_plans == 8


def test_with_all_off_no_image_has_a_plan(on):
    on.host.opts.data["sfast_enabled"] = False
    on.host.request()
    assert [on.decode() for _ in range(3)] == ["original"] * 3 and accelerator_of(on.vae.decoder) is None


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("in_place", [True, False], ids=["copied", "replaced"])
def test_another_vae_in_the_same_modules_keeps_the_plans(on, in_place):
    for _ in range(3):
        on.image()
    vaes.load_other(on.host, on.model, 5, in_place)
    on.twin.first_stage_model = vaes.make_vae(5)
    assert on.image() == "plan" and on.counter("vae_captures") == 1


def test_another_vae_without_a_callback_is_seen(on):
    for _ in range(3):
        on.image()
    on.vae.load_state_dict(vaes.make_vae(6).state_dict())
    on.twin.first_stage_model = vaes.make_vae(6)
    assert on.decode() == "plan"


def test_a_vae_of_another_dtype_gets_other_plans_and_its_own_result(on):
    for _ in range(3):
        on.image()
    for dtype in (torch.bfloat16, torch.float32):
        # --no-half-vae, or the WebUI's own upcast, between two images
        on.vae.to(dtype)
        on.twin.first_stage_model.to(dtype)
        done = [on.image() for _ in range(4)]
        assert "plan" in done and done[0] != "plan", (dtype, done)


@pytest.mark.skipif(not HALF_ON_THE_CPU, reason="this torch has no convolution in float16 on a CPU")
def test_the_upcast_in_the_middle_of_an_image(on):
    for vae in (on.vae, on.twin.first_stage_model):
        vae.to(torch.float16)
        # overflows in float16 alone
        vae.decoder.conv_in.weight.mul_(3e5).clamp_(-6e4, 6e4)
    done = []
    for _ in range(5):
        found, expected = vaes.decode(on.model, LATENT), vaes.decode(on.twin, LATENT)
        assert torch.isfinite(found).all() == torch.isfinite(expected).all()
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1 * float(expected.abs().nan_to_num().mean()))
        done.append(on.vae.dtype)
    assert done[0] == on.twin.first_stage_model.dtype


def test_circular_padding_is_another_computation(on):
    for _ in range(3):
        on.image()
    for circular in (True, False):
        on.host.hijack.circular_enabled = circular
        for model in (on.model, on.twin):
            vaes.set_circular(model, circular)
        done = [on.image() for _ in range(4)]
        assert done[0] != "plan" or not circular
        assert done[-1] == "plan"


def test_another_attention_is_another_computation(on, monkeypatch):
    from ldm.modules.diffusionmodules.model import AttnBlock

    for _ in range(3):
        on.image()
    monkeypatch.setattr(AttnBlock, "forward", vaes.doggettx)
    done = [on.image() for _ in range(4)]
    assert done[0] != "plan" and done[-1] == "plan"
    assert any(plan["fused"]["scaled_dot_product"] for plan in on.status()["plans"])


def test_a_patch_in_the_decoder_is_bypassed_by_name_and_the_steps_are_not(on):
    for _ in range(3):
        on.image()

    def brighter(x: torch.Tensor) -> torch.Tensor:
        return 1.5 * type(on.vae.decoder.conv_out).forward(on.vae.decoder.conv_out, x)

    on.vae.decoder.conv_out.forward = brighter
    twin = on.twin.first_stage_model.decoder.conv_out
    twin.forward = lambda x: 1.5 * nn.Conv2d.forward(twin, x)
    assert [on.image() for _ in range(2)] == ["original", "original"]
    status = on.session.status()
    assert "brighter" in on.status()["idle"] and status["badge"]["state"] == "on"
    assert any("VAE decoder" in each["message"] and "brighter" in each["message"] for each in status["events"])
    del on.vae.decoder.conv_out.forward, twin.forward
    assert on.image() == "plan" and on.status()["idle"] is None


def test_another_extension_s_decoder_runs_and_ours_again_after_it(on):
    # as Tiled VAE does it
    for _ in range(3):
        on.image()
    decoder = on.vae.decoder
    decoder.original_forward, decoder.forward = decoder.forward, lambda z: 2 * decoder.original_forward(z)
    on.twin.first_stage_model.decoder.register_forward_hook(lambda _m, _a, y: 2 * y)
    on.image()
    decoder.forward = decoder.original_forward
    on.twin.first_stage_model.decoder._forward_hooks.clear()
    on.image()
    on.image()


def test_previews_in_another_thread_while_steps_are_made(on):
    wrong: list[BaseException] = []

    def preview() -> None:
        try:
            for _ in range(6):
                on.decode(WIDE)
        except BaseException as exc:
            wrong.append(exc)

    thread = threading.Thread(target=preview)
    thread.start()
    for _ in range(4):
        on.image()
    thread.join()
    assert not wrong and on.counter("errors") == 0
    # of one generation's plans only one is made, and that of the images may have been it
    on.host.generate()
    assert [on.decode(WIDE) for _ in range(2)][-1] == "plan"


def test_a_vae_of_another_kind_is_left_alone(on):
    on.model.first_stage_model = standin.Vae()
    on.host.fire("model_loaded", on.model)
    assert accelerator_of(on.vae.decoder) is None
    assert accelerator_of(on.model.first_stage_model.decoder) is None


def test_dropping_plans_drops_those_of_the_vae(on):
    for _ in range(3):
        on.image()
    assert on.session.drop_plans() == 2
    assert on.image() == "prepared"


def test_hypertile_bypasses_it_while_on(on):
    block = on.vae.decoder.mid.attn_1
    params = SimpleNamespace(enabled=True, forward=block.forward)
    vars(block)["__webui_hypertile_params"] = params
    on.host.request()
    assert [on.decode() for _ in range(3)] == ["original"] * 3
    assert on.status()["idle"].startswith("Hypertile is on")
    params.enabled = False
    on.host.request()
    assert [on.decode() for _ in range(3)] == ["original", "prepared", "plan"]


def test_weights_are_given_back_as_they_were(on):
    before = {k: v.clone() for k, v in on.vae.state_dict().items()}
    for _ in range(3):
        on.image()
        on.encode()
    for name, value in on.vae.state_dict().items():
        assert torch.equal(value, before[name]) and value.is_contiguous()
    a1111.A1111Session.stop()
    for name, parameter in on.vae.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.is_contiguous()
    with contextlib.suppress(AttributeError):
        assert accelerator_of(on.vae.decoder) is None


@pytest.mark.parametrize(("tight", "eight_bits"), [(True, True), (True, False), (False, True)])
def test_next_to_8_bits_on_a_small_card_the_second_image_makes_the_plan(tight, eight_bits, monkeypatch):
    monkeypatch.setattr(hosts_vae, "GAIN", 0.25)
    monkeypatch.setattr(gpu_room, "is_tight", lambda: tight)
    config = HostConfig(eight_bits=eight_bits, allow_cpu=True)
    followed = hosts_vae.Vaes(lambda module, named: Hooks(), Report()).follow([vaes.make_vae(2)], config)
    assert [each.config.rare_gain for each in followed] == 2 * [math.inf if tight and eight_bits else 0.25]
