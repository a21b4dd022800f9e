"""AUTOMATIC1111 with 8 bits on a card that is small for its model, on a pretended GPU: half-precision weights stay in
system memory."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import eight_bit_kernels
import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from ldm.modules import attention
from pairs import one_of
from pretended_card import GPU, Card, apart, pretended_card, small_reserves
from torch import nn

from hosts.standins import a1111 as standin
from sfast_ext import accelerator_of
from sfast_ext.hosts.a1111 import adapter as a1111
from sfast_ext.hosts.a1111 import memory
from sfast_ext.kernels.backend import health
from sfast_ext.plans.graph_pool import pool_of
from sfast_ext.runtime.model_state import ModuleContext
from sfast_ext.runtime.verify import relative_error

pytestmark = pytest.mark.usefixtures("proportions")
HALF = torch.bfloat16
CHANNELS = 64
SIZE = sum(p.nbytes for p in standin.make_unet(1, CHANNELS, levels=2).parameters()) // 2
_of_twins: dict[Any, list[torch.Tensor]] = {}
"""What a twin gives at each step of an image, by its checkpoint, the image's seed and LoRAs: tests begin alike."""
MEDVRAM, LOWVRAM, NONE = "--medvram", "--lowvram", "no flag"


def halved(unet: Any) -> nn.Module:
    """As ldm's own `convert_to_fp16` leaves it: what concerns the time, and group norms, stay as they are."""
    for name, module in unet.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.LayerNorm)) and "emb" not in name:
            module.to(HALF)
    unet.dtype = HALF
    return unet


class Running:
    """The host, and a twin of its UNet."""

    def __init__(self, host: Any, card: Card, flag: str) -> None:
        self.host, self.card, self.flag = host, card, flag
        self.seed = 0
        self.load(1)

    def load(self, seed: int) -> None:
        host = self.host
        made = standin.make_unet

        def in_half(*args: Any) -> nn.Module:
            return halved(made(*args))

        standin.make_unet = in_half
        try:
            self.model = host.load(seed, CHANNELS, medvram=self.flag != NONE, blocks=self.flag == LOWVRAM, levels=2)
        finally:
            standin.make_unet = made
        self.checkpoint, self.twin = seed, in_half(seed, CHANNELS, 2)
        standin.name_layers(self.twin, "diffusion_model")

    @property
    def unet(self) -> nn.Module:
        return self.model.model.diffusion_model

    @property
    def session(self) -> Any:
        return a1111.A1111Session.running

    @property
    def accelerator(self) -> Any:
        return accelerator_of(self.unet)

    def counter(self, name: str) -> int:
        return int(self.session.report.counter(name))

    @property
    def away(self) -> int:
        """How many parameters of linear layers are in system memory."""
        return sum(m.weight.device.type == "cpu" for m in self.unet.modules() if isinstance(m, nn.Linear))

    @torch.no_grad()
    def image(self, steps: int = 3, networks: tuple[Any, ...] = ()) -> float:
        """Make an image; how far it is from the twin's."""
        host, size = self.host, 8
        self.seed += 1
        host.networks.loaded_networks = list(networks)
        with apart():
            for layer in self.twin.modules():
                if hasattr(layer, "network_layer_name") and hasattr(layer, "weight"):
                    host._apply_lora(layer)
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn((2, 4, size, size), generator=generator).to(HALF)
        context = torch.randn((2, 7, standin.CONTEXT), generator=generator).to(HALF)
        self.card.peak = 0
        if self.flag != NONE:
            self.model.cond_stage_model(context.to(GPU))
        denoiser = standin.Denoiser()
        denoiser.p, denoiser.step = SimpleNamespace(batch_size=1), 0
        found, wanted, worst = x.to(GPU), x, 0.0
        each = tuple((n.name, n.te_multiplier, n.unet_multiplier, n.dyn_dim) for n in networks)
        others = _of_twins.setdefault((self.checkpoint, self.seed, each), [])
        for step in range(steps):
            event = SimpleNamespace(denoiser=denoiser, sampling_step=max(0, step - 1), sampling_steps=steps)
            host.fire("cfg_denoiser", event)
            denoiser.step += 1
            t = torch.full((2,), 900 - 100 * step)
            wrapper = self.model.model
            call = wrapper if self.model.lowvram else wrapper.diffusion_model
            noise = call(found, t.to(GPU), context=context.to(GPU))
            if step == len(others):
                with apart():
                    others.append(self.twin(wanted, t, context=context))
            other = others[step]
            worst = max(worst, relative_error([noise.cpu()], [other]))
            wanted = wanted - 0.1 * other
            found = wanted.to(GPU)
        if self.flag != NONE:
            self.host.lowvram.send_me_to_gpu(self.model.first_stage_model)
            self.model.first_stage_model.decoder(torch.zeros(1, 4, 8, 8).to(GPU))
            self.host.lowvram.send_everything_to_cpu()
        assert not self.card.faults
        return worst


@pytest.fixture
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A card with room for so many UNets."""
    flag, room = request.param
    eight_bit_kernels.resident(monkeypatch, SIZE)
    small_reserves(monkeypatch, SIZE, away=1)
    monkeypatch.setattr(attention, "_ATTN_PRECISION", "half")
    options = {"sfast_triton": False, "sfast_eight_bits": True, "sfast_tolerance": 0.1}
    with standin.running(**options) as host, pretended_card(monkeypatch, int(room * SIZE)) as card:
        eight_bit_kernels.without_memory(monkeypatch, card)
        host.place = host.shared.device = GPU
        a1111.start("test")
        yield Running(host, card, flag)
        a1111.A1111Session.stop()
        assert host.errors == []
    health.clear()


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("on", [(MEDVRAM, 1.9), (NONE, 1.9)], indirect=True)
def test_the_unet_stays_in_8_bits(on: Running) -> None:
    for _ in range(3):
        assert on.image(steps=5) < 0.06
    assert on.accelerator.status()["eight_bits"]["layers"] > 5
    assert on.away and on.counter("errors") == 0


def net(name: str, multiplier: float = 1.0, layers: tuple[str, ...] | None = None) -> Any:
    found = SimpleNamespace(name=name, te_multiplier=1.0, unet_multiplier=multiplier, dyn_dim=None)
    if layers is not None:
        found.modules = dict.fromkeys(layers)
    return found


def senders(on: Running) -> int:
    """Before how many modules the host's function runs."""
    return sum("send_me_to_gpu" in str(m._forward_pre_hooks) for m in on.unet.modules())


def left_as_lowvram_has_it(on: Running) -> bool:
    """Whether at most a block is on the GPU, and what is always there."""
    there = {name.split(".")[0] for name, p in on.unet.named_parameters() if p.device.type == "cuda"}
    return senders(on) > 5 and not there & set(memory.UNET_BLOCKS) and "out" in there


@pytest.mark.parametrize("on", [(LOWVRAM, 1.9)], indirect=True)
def test_with_lowvram_the_unet_comes_as_a_whole(on: Running) -> None:
    for networks in ((), (), (net("a", 3.0),), ()):
        assert on.image(4, networks) < 0.1
    assert on.accelerator.status()["eight_bits"]["layers"] > 5 and senders(on) == 0
    assert on.counter("replays") > 4 and on.counter("errors") == 0 and on.counter("weights_away") >= 4
    on.host.opts.data["sfast_eight_bits"] = False
    assert on.image(4) < 1e-3 and left_as_lowvram_has_it(on)
    assert "block by block" in str(on.session.report.as_dict()["reasons"])
    on.host.opts.data["sfast_eight_bits"] = True
    assert on.image(2) < 0.06 and on.image(2) < 0.06 and senders(on) == 0
    on.load(2)
    assert on.image(2) < 0.06 and on.image(2) < 0.06 and senders(on) == 0
    a1111.A1111Session.stop()
    assert on.image(2) < 1e-3 and left_as_lowvram_has_it(on)
    a1111.start("test")


@pytest.mark.parametrize("on", [(LOWVRAM, 1.05)], indirect=True)
def test_with_lowvram_a_unet_without_room_comes_block_by_block(on: Running) -> None:
    assert on.image(2) < 1e-3 and left_as_lowvram_has_it(on)
    assert on.counter("captures") == 0 and on.counter("out_of_memory") == 0


@pytest.mark.parametrize("on", [(LOWVRAM, 1.9)], indirect=True)
def test_with_lowvram_blocks_come_again_if_memory_runs_out(on: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    assert on.image(4) < 0.06 and senders(on) == 0

    def others_take_some(*_: object) -> None:
        on.card.capacity = int(0.9 * SIZE)

    wrapper = on.model.model
    hooks = [wrapper.register_forward_pre_hook(others_take_some, prepend=True),
             on.unet.out.register_forward_hook(lambda module, given, result: result)]  # fmt: skip
    # weights are read by layer as long as there is room for that
    assert on.image(2) < 1e-3 and senders(on) == 0
    monkeypatch.setattr(ModuleContext, "run_by_layer", short)
    assert on.image(2) < 1e-3 and left_as_lowvram_has_it(on)
    for hook in hooks:
        hook.remove()
    on.card.capacity = int(1.9 * SIZE)
    assert on.image(2) < 1e-3 and left_as_lowvram_has_it(on) and not on.host.errors


def one(number: int, room: float = 1.9) -> Any:
    """With and without `--medvram` in turns."""
    return pytest.mark.parametrize("on", one_of(number, (MEDVRAM, room), (NONE, room)), indirect=True)


@one(0)
def test_a_lora_is_applied_on_the_gpu_and_followed_at_its_step(on: Running) -> None:
    on.image(6)
    seen, apply = [], on.host.networks.network_apply_weights

    def applied(layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            seen.append(layer.weight.device.type)
        apply(layer)

    on.host.networks.network_apply_weights = applied
    for networks in ((net("a", 3.0),), (net("a", 3.0), net("b", -2.0)), (), (net("b", 4.0),)):
        seen.clear()
        assert on.image(2, networks) < 0.2
        assert not networks or set(seen) == {"cuda"}
        assert on.image(2, networks) < 0.2
    assert on.away and on.counter("errors") == 0 and on.counter("captures") == 1


@pytest.mark.long
@one(1)
def test_layers_that_a_lora_does_not_change_stay_where_they_are(on: Running) -> None:
    on.image(7)
    seen, apply = [], on.host.networks.network_apply_weights

    def applied(layer: nn.Module) -> None:
        if isinstance(layer, nn.Linear):
            seen.append(layer.weight.device.type)
        apply(layer)

    on.host.networks.network_apply_weights = applied
    on.host.networks.loaded_networks = [net("a", 0.0, ("no_such_layer",))]
    assert on.image(2, (net("a", 0.0, ("no_such_layer",)),)) < 0.06
    assert seen.count("cpu") > 5


@pytest.mark.long
@one(1, 2.1)
def test_another_forward_over_the_unet_gets_its_weights(on: Running) -> None:
    on.image(4)
    unet, original = on.unet, on.unet.forward
    plain = type(unet).forward
    unet.forward = lambda *args, **kwargs: plain(unet, *args, **kwargs)
    assert on.image(3) < 0.02
    unet.forward = original
    for _ in range(2):
        assert on.image(3) < 0.06
    # what is short of memory meanwhile is a plan of a block, and is bypassed
    error = on.session.report.as_dict()["last_error"]
    assert on.away and (error is None or "out of memory" in error["message"])


@one(1)
def test_off_and_on_by_the_setting(on: Running) -> None:
    assert on.image(4) < 0.06
    on.host.opts.data["sfast_eight_bits"] = False
    assert on.image(3) < 0.02 and on.accelerator.status()["eight_bits"]["bytes"] == 0
    assert on.flag != NONE or not on.away
    on.host.opts.data["sfast_eight_bits"] = True
    assert on.image(4) < 0.06 and on.counter("errors") == 0
    on.host.opts.data["sfast_enabled"] = False
    assert on.image(2) < 1e-3


@one(0)
def test_another_checkpoint(on: Running) -> None:
    on.image(4)
    on.load(2)
    gc.collect()
    for _ in range(3):
        assert on.image(3) < 0.06
    assert on.counter("errors") == 0 and on.away


@one(1)
def test_what_is_resident_is_about_half(on: Running) -> None:
    for _ in range(2):
        on.image(3)
    status = on.accelerator.status()["weights"]
    assert on.session.report.counter("out_of_memory") == 0
    weights = [m.weight for m in on.unet.modules() if isinstance(m, nn.Linear)]
    there = sum(weight.numel() for weight in weights if weight.device.type == "cpu")
    assert there and on.flag != NONE or 0.9 * there < status["eight_bits_bytes"] < 1.4 * there


@pytest.mark.long(but=[1])
@pytest.mark.parametrize(("on", "seed"), [((MEDVRAM, 2.1), 0), ((NONE, 2.1), 1)], indirect=["on"])
def test_random_scenes(on: Running, seed: int) -> None:
    rng = random.Random(seed)
    networks: tuple[Any, ...] = ()
    done: list[str] = []
    for _ in range(6 if os.environ.get("SFAST_ALL_CASES") else 4):
        scene = rng.choice(["a lora", "no lora", "8 bits", "a checkpoint", "memory", "all off"])
        done.append(scene)
        steps = rng.randint(1, 4)
        if scene == "a lora":
            networks = tuple(net(name, rng.choice([1.0, -1.0, 2.0])) for name in rng.sample("abc", rng.randint(1, 2)))
        elif scene == "no lora":
            networks = ()
        elif scene == "8 bits":
            on.host.opts.data["sfast_eight_bits"] ^= True
        elif scene == "all off":
            on.host.opts.data["sfast_enabled"] = not on.host.opts.data.get("sfast_enabled", True)
        elif scene == "a checkpoint":
            on.host.networks.loaded_networks = []
            on.load(rng.randint(1, 3))
        else:
            pool_of(GPU).make_room(on.session.report)
        assert on.image(steps, networks) < 0.12, done
