"""SD.Next's balanced offload with 8 bits on a card that is small for its model, on a pretended GPU: half-precision
weights stay in system memory, and weights in 8 bits are what moves."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import eight_bit_kernels
import pytest
import torch
from pairs import one_of
from passes.diffusion_transformers import available
from pretended_card import GPU, Card, apart, pretended_card, small_reserves
from small_transformers import inputs
from torch import nn
from torch.utils._pytree import tree_map_only

from hosts.standins.sdnext import Host, diffusers, hosted, network
from sfast_ext import accelerator_of
from sfast_ext.kernels.backend import health
from sfast_ext.runtime.verify import relative_error
from sfast_ext.tools.lib import models, transformers

HALF = torch.bfloat16


@functools.lru_cache(maxsize=None)
def _unet(seed: int) -> Any:
    made = diffusers.UNet2DConditionModel(
        block_out_channels=(64, 128), down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), sample_size=16, layers_per_block=1, norm_num_groups=8,
        cross_attention_dim=64, attention_head_dim=2,
    )  # fmt: skip
    # deltas of a LoRA are as large as torch's own weights then, and 8 bits stay within what is allowed
    for value in models.randomise(made.to(HALF), seed).parameters():
        value.data *= 0.5 if value.dim() > 1 else 1
    return made.eval()


SIZE = sum(p.nbytes for p in _unet(0).parameters())


class Other(nn.Module):
    """A text encoder or a VAE: what makes the UNet leave."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64).to(HALF)

    @property
    def device(self) -> torch.device:
        return self.layer.weight.device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def away(network: Any) -> int:
    """How many parameters are in system memory while the network is on the GPU."""
    return sum(p.device.type == "cpu" for p in network.parameters()) if network.device.type == "cuda" else 0


@functools.lru_cache(maxsize=None)
def _encoder() -> Other:
    torch.manual_seed(9)
    return Other()


@functools.lru_cache(maxsize=None)
def _latent(checkpoint: int, steps: int, seed: int, multiplier: float, side: int) -> torch.Tensor:
    """What a twin of the UNet makes, on a CPU: many images of the tests are the same."""
    unet, cpu = models.copied(_unet(checkpoint)), torch.device("cpu")
    lora, devices = (importlib.import_module(f"modules.{name}") for name in ("lora", "devices"))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), apart():
        patch.setattr(devices, "device", cpu)
        lora.network_activate(unet, network(unet), multiplier)
        generator = torch.Generator().manual_seed(seed)
        latent = torch.randn(1, 4, side, side, generator=generator).to(HALF)
        context = _encoder()(torch.randn(2, 7, 64, generator=generator).to(HALF))
        for step in range(steps):
            t = torch.tensor(900 - 200 * step)
            noise = unet(torch.cat([latent, latent]), t, encoder_hidden_states=context, return_dict=False)[0]
            uncond, cond = noise.chunk(2)
            latent = latent - 0.1 * (uncond + 3.0 * (cond - uncond))
    return latent


class Running:
    """The host on a card."""

    def __init__(self, host: Host, card: Card) -> None:
        self.host, self.card = host, card
        self.devices = host.sd_offload.devices
        self.load(0)

    def load(self, seed: int) -> None:
        self.checkpoint = seed
        self.encoder = copy.deepcopy(_encoder())
        info = SimpleNamespace(name=f"tiny-{seed}")
        pipe = SimpleNamespace(
            unet=models.copied(_unet(seed)), text_encoder=copy.deepcopy(self.encoder), sd_checkpoint_info=info
        )
        self.host.sd_models.reload_model_weights(lambda: pipe)

    @property
    def unet(self) -> Any:
        return self.host.modeldata.model_data.sd_model.unet

    def image(self, steps: int = 3, seed: int = 1, multiplier: float = 0.0, side: int = 8, **more: Any) -> float:
        """Make an image; how far its latent is from one of a twin."""
        wanted = _latent(self.checkpoint, steps, seed, multiplier, side)
        job: dict[str, Any] = {"width": side, "height": side, "steps": steps, "seed": seed, **more}
        found = self.host.image(network=network(_unet(self.checkpoint)), multiplier=multiplier, **job)
        assert not self.card.faults
        return relative_error([found], [wanted])

    @property
    def away(self) -> int:
        """How many parameters are in system memory while the UNet is on the GPU."""
        return away(self.unet)

    def counter(self, name: str) -> int:
        return int(self.host.session.report.counter(name))


@pytest.fixture
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A card with room for so many UNets."""
    eight_bit_kernels.resident(monkeypatch, SIZE)
    small_reserves(monkeypatch, SIZE)
    room, release = request.param
    with pretended_card(monkeypatch, int(room * SIZE)) as card:
        eight_bit_kernels.without_memory(monkeypatch, card)
        for host in hosted(monkeypatch, release):
            host.opts.sfast_triton, host.opts.sfast_eight_bits, host.opts.sfast_tolerance = False, True, 0.1
            host.opts.diffusers_offload_mode = "balanced"
            host.opts.diffusers_offload_min_gpu_memory = 0
            found = Running(host, card)
            found.devices.device = GPU
            found.load(0)
            yield found
            assert not host.shared.warnings
    health.clear()


RELEASES = (1.9, "july"), (1.9, "august")


def release(number: int) -> Any:
    return pytest.mark.parametrize("on", one_of(number, *RELEASES), indirect=True)


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("on", RELEASES, indirect=True)
def test_weights_in_8_bits_move(on: Running) -> None:
    for _ in range(2):
        assert on.image(steps=4) < 0.06
    assert on.away > 20 and on.counter("replays") > 5, on.host.reasons()
    told = accelerator_of(on.unet).status()["eight_bits"]
    assert told["layers"] > 10 and told["reason"] is None
    assert on.counter("errors") == 0 and on.counter("captures") == 1


@release(0)
def test_a_lora_is_followed_at_its_step(on: Running) -> None:
    for _ in range(4):
        on.image()
    for multiplier in (1.0, -1.0, 0.0, 2.0):
        assert on.image(2, multiplier=multiplier) < 0.1
        assert on.image(2, multiplier=multiplier) < 0.1
        assert on.away > 20
    assert on.counter("errors") == 0 and on.counter("captures") == 1


def in_8_bits(on: Running) -> None:
    away = []
    for _ in range(3):
        # in its eleventh step a plan is compared, and half-precision weights are back at its end
        assert on.image() < 0.06
        away.append(on.away)
    assert sorted(away)[1] > 20


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
@release(1)
def test_off_on_and_another_checkpoint(on: Running, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        in_8_bits(on)
        on.host.opts.sfast_eight_bits = False
        assert on.image() < 0.02 and on.away == 0
        assert accelerator_of(on.unet).status()["eight_bits"]["bytes"] == 0
        on.host.opts.sfast_eight_bits = True
        in_8_bits(on)
        on.load(seed + 1)
    in_8_bits(on)
    on.host.opts.sfast_enabled = False
    assert on.image() < 1e-3 and on.away == 0 and on.counter("errors") == 0


@functools.lru_cache(maxsize=None)
def _transformer() -> Any:
    wide = {"dim": 192, "n_heads": 6, "n_kv_heads": 6, "axes_dims": [8, 12, 12], "cap_feat_dim": 64}
    return transformers.random_transformer("tiny-z-image", dtype=HALF, **wide)


TRANSFORMER_SIZE = sum(p.nbytes for p in _transformer().parameters()) if transformers.available("z-image") else 0


@pytest.mark.long
@pytest.mark.skipif(not TRANSFORMER_SIZE, reason="diffusers without Z-Image")
@pytest.mark.parametrize("on", [(1.9 * TRANSFORMER_SIZE / SIZE, "july")], indirect=True)
def test_a_transformer(on: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch)
    small_reserves(monkeypatch, TRANSFORMER_SIZE)
    ours, twin = models.copied(_transformer()), models.copied(_transformer())
    pipe = SimpleNamespace(
        transformer=ours, text_encoder=copy.deepcopy(on.encoder), sd_checkpoint_info=SimpleNamespace(name="z-image")
    )
    on.host.sd_models.reload_model_weights(lambda: pipe)
    lora, cpu = on.host.processing.lora, torch.device("cpu")
    network = {
        name: 0.2 * torch.randn(module.weight.shape) for name, module in ours.named_modules()
        if name.endswith(("to_q", "to_out.0", "w2"))
    }  # fmt: skip

    def image(multiplier: float = 0.0, size: tuple[int, int] = (8, 8)) -> float:
        on.host.script_callbacks.fire("before_process", SimpleNamespace())
        on.host.sd_offload.apply_balanced_offload(pipe)
        lora.network_activate(ours, network, multiplier)
        on.devices.device = cpu
        lora.network_activate(twin, network, multiplier)
        on.devices.device = GPU
        errors = []
        with torch.no_grad():
            pipe.text_encoder(torch.randn(2, 7, 64).to(GPU, HALF))
            on.host.shared.state.begin("Inference")
            for step in range(4):
                with apart():
                    args, kwargs = inputs(twin, size, (5,), timestep=0.9 - 0.2 * step, seed=step)
                    wanted = transformers.result_of(twin(*args, **kwargs))
                args, kwargs = tree_map_only(torch.Tensor, lambda x: x.to(GPU), (args, kwargs))
                found = transformers.result_of(ours(*args, **kwargs))
                errors.append(relative_error([found.cpu()], [wanted]))
        assert not on.card.faults
        return max(errors)

    for _ in range(2):
        assert image() < 0.06
    assert away(ours) == 28 and on.counter("replays") > 3, on.host.reasons()
    for multiplier in (1.0, -1.0, 0.0):
        assert image(multiplier) < 0.1 and image(multiplier) < 0.1
        assert away(ours) == 28
    assert image(size=(8, 12)) < 0.06 and on.counter("captures") == 2 and on.counter("errors") == 0
    on.host.opts.sfast_eight_bits = False
    assert image() < 0.02 and away(ours) == 0
    assert accelerator_of(ours).status()["eight_bits"]["bytes"] == 0
