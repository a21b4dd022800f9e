"""A Forge with 8 bits on a card that is small for its model, on a pretended GPU, for the tests of those that keep
half-precision weights in system memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import eight_bit_kernels
import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
from ldm.modules import attention
from pretended_card import GPU, Card, apart, pretended_card, small_reserves
from torch import nn

from hosts.standins import forge_neo_memory
from sfast_ext import accelerator_of
from sfast_ext.hosts.forge import adapter as forge
from sfast_ext.kernels.backend import health
from sfast_ext.kernels.eight_bits import quantise_weights
from sfast_ext.runtime.verify import relative_error
from sfast_ext.weights import expected

CHANNELS = 64
SIZE = sum(p.nbytes for p in forge_neo_memory.make_unet(1, CHANNELS, 2).parameters())
SMALL = SIZE // 20
"""What torch rounds up, indices, inputs and results of a tiny model."""
RESERVE = int(0.65 * SIZE)
"""What Forge leaves free for a forward."""


def shown(image: torch.Tensor, size: int = 8) -> torch.Tensor:
    """What the steps changed of the noise."""
    return image - torch.randn((2, 4, size, size), generator=torch.Generator().manual_seed(0))


@functools.lru_cache(maxsize=None)
def of(
    seed: int,
    steps: int = 3,
    size: int = 8,
    channels_last: tuple[str, ...] = (),
    standin: ModuleType = forge_neo_memory,
    **loras: float,
) -> torch.Tensor:
    """The image of a checkpoint without us, on a CPU; these of its weights are channels last."""
    with standin.running(sfast_enabled=False) as other, apart():
        other._load = other.load_whole
        other.load(seed, CHANNELS)
        other.lora(everywhere=True, **loras)
        for name in channels_last:
            weight = other.unet.get_parameter(name)
            weight.data = weight.data.to(memory_format=torch.channels_last)
        return shown(other.generate(steps, size), size)


class Running:
    """The host on a GPU.

    Args:
        kind: the class of its session.
    """

    def __init__(self, host: Any, card: Card, standin: ModuleType, kind: type[forge.ForgeSession]) -> None:
        self.host, self.card, self.seed = host, card, 1
        self.standin, self.kind = standin, kind
        self.loras: dict[str, float] = {}

    @property
    def session(self) -> Any:
        return self.kind.running

    def of(self, seed: int, *args: Any, **loras: Any) -> torch.Tensor:
        """See `of`."""
        return of(seed, *args, standin=self.standin, **loras)

    @property
    def patcher(self) -> Any:
        """The class of its patchers."""
        return type(self.host.model_data.sd_model.original)

    @property
    def in_layers(self) -> bool:
        """Whether a LoRA may be computed in the layers."""
        return hasattr(self.patcher, "has_online_lora")

    @property
    def accelerator(self) -> Any:
        return accelerator_of(self.host.unet)

    @property
    def model(self) -> Any:
        return self.host.model_data.sd_model.forge_objects.unet.model

    @property
    def in_parts(self) -> bool:
        """Whether the UNet is loaded in parts."""
        marked = any("prev_parameters_manual_cast" in vars(m) for m in self.host.unet.modules())
        return marked or getattr(self.model, "model_lowvram", False)

    @property
    def told(self) -> tuple[int, int]:
        """Bytes of the UNet that Forge takes for loaded, and that it would load."""
        (loaded,) = [each for each in self.host.current if each.model.model is self.model]
        if hasattr(loaded, "model_offloaded_memory"):
            return loaded.model_loaded_memory(), loaded.model_offloaded_memory()
        loaded.compute_inclusive_exclusive_memory()
        return loaded.inclusive_memory, loaded.exclusive_memory

    @property
    def loaded(self) -> int:
        """Bytes of the UNet that Forge takes for loaded; none if it has left the GPU."""
        if hasattr(self.model, "model_loaded_weight_memory"):
            return int(self.model.model_loaded_weight_memory)
        known = any(each.model.model is self.model for each in self.host.current)
        return sum(p.nbytes for p in self.host.unet.parameters() if p.is_cuda) if known else 0

    @contextlib.contextmanager
    def without_room_for_all(self) -> Iterator[None]:
        """Within, all of the UNet finds no room on the GPU."""
        name = "load" if hasattr(self.patcher, "load") else "forge_patch_model"
        real = getattr(self.patcher, name)

        def short(patcher: Any, device: Any = None, *args: Any, **more: Any) -> Any:
            if more.get("full_load", name != "load" and device is not None):
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            return real(patcher, device, *args, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.patcher, name, short)
            yield

    def counter(self, name: str) -> int:
        return int(self.session.report.counter(name))

    @property
    def away(self) -> int:
        """How many parameters of linear layers are in system memory."""
        return sum(m.weight.device.type == "cpu" for m in self.host.unet.modules() if isinstance(m, nn.Linear))

    @property
    def off(self) -> int:
        """Bytes of the UNet in system memory."""
        return sum(p.nbytes for p in self.host.unet.parameters() if not p.is_cuda)

    @property
    def there(self) -> int:
        """Bytes of the UNet and of its weights in 8 bits on the GPU."""
        return sum(p.nbytes for p in self.host.unet.parameters() if p.is_cuda) + self.accelerator.arena.banks.held

    def plan_runs(self) -> int:
        return self.counter("replays") + self.counter("eager_runs")

    def lora(self, online: bool = False, **loras: float) -> None:
        self.loras = loras
        self.host.lora(online=online, everywhere=True, **loras)

    def load(self, seed: int) -> None:
        self.seed = seed
        self.host.load(seed, CHANNELS)
        self.lora(**self.loras)

    def image(self, steps: int = 2, size: int = 8) -> float:
        """Make an image; how far it is from that without us."""
        wanted = self.of(self.seed, steps, size, **self.loras)
        self.card.peak = 0
        found = shown(self.host.generate(steps, size).to("cpu"), size)
        assert not self.card.faults
        return relative_error([found], [wanted])


@contextlib.contextmanager
def running_on(
    monkeypatch: pytest.MonkeyPatch, size: float, standin: ModuleType, kind: type[forge.ForgeSession]
) -> Iterator[Running]:
    """A host on a card with room for so many UNets, in 8 bits."""
    eight_bit_kernels.resident(monkeypatch, SIZE)
    small_reserves(monkeypatch, SIZE, away=1)
    monkeypatch.setattr(expected, "LEAST", 4 << 10)
    monkeypatch.setattr(attention, "_ATTN_PRECISION", "half")
    monkeypatch.setattr(standin.Host, "reserve", RESERVE)
    monkeypatch.setattr(standin.Host, "DTYPE", torch.bfloat16)
    monkeypatch.setattr("sfast_ext.hosts.forge.resident.refusal_of", lambda device: None)
    options = {"sfast_triton": False, "sfast_eight_bits": True, "sfast_tolerance": 0.1}
    with standin.running(GPU, **options) as host, pretended_card(monkeypatch, int(size * SIZE)) as card:
        eight_bit_kernels.without_memory(monkeypatch, card)
        quantise = quantise_weights.launch.function

        def without_peak(*operands: Any) -> None:
            # what the reference takes, and the kernel does not
            peak = card.peak
            quantise(*operands)
            card.peak = peak

        monkeypatch.setattr(quantise_weights.launch, "function", without_peak)
        forge.start("test")
        host.load(1, CHANNELS)
        yield Running(host, card, standin, kind)
        kind.stop()
        assert host.errors == []
    health.clear()


def room(*rooms: float) -> Any:
    return pytest.mark.parametrize("on", rooms, indirect=True)


def card_with(standin: ModuleType, kind: type[forge.ForgeSession]) -> Any:
    """The fixture `on`: a card with room for so many UNets, see `room`."""

    @pytest.fixture(name="on")
    def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
        with running_on(monkeypatch, request.param, standin, kind) as running:
            yield running

    return on
