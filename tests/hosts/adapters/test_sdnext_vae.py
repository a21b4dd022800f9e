"""The VAE in SD.Next, against the stand-in around diffusers' own: images are those of an untouched twin."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hosts.standins.sdnext import HAS_GROUPS, Host, close, diffusers, hosted, tiny_unet
from sfast_ext import accelerator_of
from sfast_ext.hosts.sdnext.refusals import layers_bypass_reason
from sfast_ext.tools.lib import models

pytestmark = pytest.mark.usefixtures("vae_plans_at_once")

needs_groups = pytest.mark.skipif(not HAS_GROUPS, reason="this diffusers cannot offload by groups")
LATENT = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(7))


def make_vae(seed: int = 1) -> Any:
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        sample_size=16,
    )
    return models.randomise(vae, seed).eval()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    for host in hosted(monkeypatch):
        name = SimpleNamespace(name="tiny")
        host.sd_models.load_model(SimpleNamespace(unet=tiny_unet(), vae=make_vae(), sd_checkpoint_info=name))
        yield host


def vae_of(host: Host) -> Any:
    return host.modeldata.model_data.sd_model.vae


def did(host: Host, action: Any, twin: Any) -> str:
    """What the VAE did, "original", "prepared" or "plan"; its result is the twin's."""
    names = {"vae_captures": "prepared", "vae_eager_runs": "plan"}
    before = {name: host.session.report.counter(name) for name in names}
    # SD.Next begins a job for each decoding
    host.shared.state.begin("VAE Decode")
    with torch.no_grad():
        found, expected = action(vae_of(host)), action(twin)
    close(found, expected)
    return next((what for name, what in names.items() if host.session.report.counter(name) > before[name]), "original")


def decoded(vae: Any) -> torch.Tensor:
    return vae.decode(LATENT.to(vae.dtype), return_dict=False)[0].float()


def encoded(vae: Any) -> torch.Tensor:
    image = torch.randn((1, 3, 16, 16), generator=torch.Generator().manual_seed(9))
    return vae.encode(image).latent_dist.sample(torch.Generator().manual_seed(2))


def test_images_are_decoded_by_a_plan_from_the_third_on(host):
    twin = copy.deepcopy(host.stock())
    counts = []
    for _ in range(4):
        close(host.image(), twin)
        counts.append([host.session.report.counter(f"vae_{name}") for name in ("captures", "eager_runs")])
    assert counts == [[0, 0], [1, 0], [1, 1], [1, 2]]
    assert host.reasons() == "" and host.status()["badge"]["state"] == "on"
    decoder = next(each for each in host.status()["accelerators"] if each["name"] == "VAE decoder")
    assert decoder["steps"] is False and [plan["label"] for plan in decoder["plans"]] == ["VAE decoder, 64x64"]


def test_encoding_draws_as_it_did(host):
    twin = make_vae()
    assert [did(host, encoded, twin) for _ in range(4)] == ["original", "prepared", "plan", "plan"]


def test_slices_and_tiles(host):
    twin = make_vae()
    for each in (vae_of(host), twin):
        each.enable_slicing()
        each.enable_tiling()
        each.tile_latent_min_size, each.tile_sample_min_size = 4, 8
    batch = torch.cat([LATENT, 2 * LATENT])

    def tiled(vae: Any) -> torch.Tensor:
        return vae.decode(batch, return_dict=False)[0]

    done = []
    for _ in range(6):
        host.session.follow()
        done.append(did(host, tiled, twin))
    # one plan for each image, whatever its tiles
    assert "plan" in done and host.session.report.counter("vae_captures") <= 6
    assert len(accelerator_of(vae_of(host).decoder).plans) <= 8


def test_its_own_upcast_for_each_image_keeps_the_plans(host):
    half, twin = make_vae().half(), make_vae().half()
    host.modeldata.model_data.sd_model.vae = half
    host.session.follow()

    def upcast(vae: Any) -> torch.Tensor:
        vae.to(torch.float32)
        try:
            return decoded(vae)
        finally:
            vae.to(torch.float16)

    assert [did(host, upcast, twin) for _ in range(5)] == ["original", "prepared", "plan", "plan", "plan"]


def test_another_vae_of_the_same_kind_keeps_the_plans(host):
    twin = make_vae()
    assert [did(host, decoded, twin) for _ in range(3)][-1] == "plan"
    host.modeldata.model_data.sd_model.vae = make_vae(5)
    host.session.follow()
    assert did(host, decoded, make_vae(5)) == "plan"
    assert host.session.report.counter("vae_captures") == 1


def test_other_kinds_are_left_alone(host):
    tiny = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1), latent_channels=4, upsampling_scaling_factor=2,
    ).eval()  # fmt: skip
    before = vae_of(host)
    host.modeldata.model_data.sd_model.vae = tiny
    host.session.follow()
    assert accelerator_of(tiny.decoder) is None and accelerator_of(before.decoder) is None


@pytest.mark.parametrize("mode", ["sequential", pytest.param("group", marks=needs_groups)])
def test_offloads_that_move_layers_leave_it_alone_and_say_so(host, mode):
    host.opts.diffusers_offload_mode = mode
    host.sd_offload.set_diffuser_offload(host.modeldata.model_data.sd_model)
    host.session.follow()
    assert accelerator_of(vae_of(host).decoder) is None
    assert any(event["stage"] == "VAE" and mode in event["message"] for event in host.status()["events"])


def test_switched_off_for_one_image(host):
    twin = make_vae()
    for _ in range(3):
        did(host, decoded, twin)
    host.opts.sfast_vae = False
    host.session.follow()
    assert accelerator_of(vae_of(host).decoder) is None and host.session.loaded() is not None
    assert did(host, decoded, twin) == "original"
    host.opts.sfast_vae = True
    host.session.follow()
    assert [did(host, decoded, twin) for _ in range(3)] == ["original", "prepared", "plan"]


def test_unloading_gives_everything_back(host):
    vae = vae_of(host)
    twin = make_vae()
    for _ in range(3):
        did(host, decoded, twin)
        did(host, encoded, twin)
    host.sd_models.unload_model_weights(op="model")
    for part in (vae.decoder, vae.encoder):
        assert accelerator_of(part) is None and "forward" not in vars(part)


def test_a_hook_that_moves_layers_is_a_reason(host):
    assert layers_bypass_reason(vae_of(host).decoder) is None
    vae_of(host).decoder.conv_in._diffusers_hook = SimpleNamespace(get_hook=lambda name: None)
    twin = make_vae()
    assert [did(host, decoded, twin) for _ in range(3)] == ["original"] * 3
    decoder = next(each for each in host.status()["accelerators"] if each["name"] == "VAE decoder")
    assert "diffusers has put hooks on layers" in decoder["idle"]
