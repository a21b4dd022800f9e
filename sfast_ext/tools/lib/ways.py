"""The ways to run a UNet call that a benchmark compares: an engine, an attention, and what ours is to do without."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sfast_ext.kernels.backend import triton_runtime
from sfast_ext.tools.lib import Unavailable, attentions, engines, transformers

LOSSY = {"faster_sums": "faster sums", "eight_bits": "8 bits"}
"""Fields of `Config` that change details of an image, in words."""


@dataclass(frozen=True)
class Way:
    """One way to run a call."""

    engine: str
    attention: str = "sdp"
    """One of `attentions.NAMES`: the model has the same for every engine."""
    upcast: bool = False
    triton: bool = True
    """Ours alone: whether it may use Triton."""
    capability: tuple[int, int] | None = None
    """Ours alone: the compute capability that the GPU passes for when kernels are chosen."""
    dtype: str | None = None
    """Of the model, which every engine has in the same; None for float16 on a GPU and float32 elsewhere."""
    faster_sums: bool = False
    """Ours alone, as the next: see `Config`."""
    eight_bits: bool = False

    def __str__(self) -> str:
        return ", ".join([self.engine, *self.words()])

    def words(self) -> list[str]:
        """What is not as it is by default."""
        return words_of(self.fields())

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        return {"engine": self.engine, **self.stack()}

    def stack(self) -> dict[str, Any]:
        """For JSON, all but the engine."""
        return {
            "attention": self.attention,
            "upcast": self.upcast,
            "without": [] if self.triton else ["triton"],
            "as": card(self.capability) if self.capability else None,
            **({"dtype": self.dtype} if self.dtype else {}),
            **{name: True for name in LOSSY if getattr(self, name)},
        }

    def arguments(self) -> list[str]:
        """For the command line."""
        words = ["--attention", self.attention, *["--upcast"] * self.upcast]
        words += [] if self.triton else ["--without", "triton"]
        words += ["--dtype", self.dtype] if self.dtype else []
        words += [f"--{name.replace('_', '-')}" for name in LOSSY if getattr(self, name)]
        return words + (["--as", card(self.capability)] if self.capability else [])

    @property
    def model_key(self) -> tuple[str, bool]:
        """Equal for ways whose models have the same attention."""
        return self.attention, self.upcast

    def model(self, unet: nn.Module) -> nn.Module:
        """Gives a UNet the attention.

        Raises:
            Unavailable: it cannot be had here.
        """
        if transformers.kind_of(unet) is None:
            attentions.install(unet, self.attention, upcast=self.upcast)
        elif self.model_key != OURS.model_key:
            raise Unavailable("a transformer has its own attention, by PyTorch")
        return unet

    def start(self, unet: nn.Module) -> engines.Engine:
        """The engine for a UNet that has the attention.

        Raises:
            Unavailable: the GPU cannot pass for the one that is asked for.
        """
        if self.engine != OURS.engine:
            return engines.ENGINES[self.engine](unet)
        if self.capability is not None:
            check_card(self.capability, next(unet.parameters()).device)
        return Ours(unet, self)


OURS = Way("sfast")


def asked(args: argparse.Namespace) -> Way:
    """What `cli.add_stack` was told of ours."""
    base = Way(OURS.engine, args.attention, args.upcast, "triton" not in args.without, args.capability, args.dtype)
    return replace(base, faster_sums=args.faster_sums, eight_bits=args.eight_bits)


def side_by_side(ours: Way, names: Iterable[str]) -> list[Way]:
    """A way for each engine: that of ours, and the others with the same attention and dtype."""
    return [ours if name == ours.engine else Way(name, *ours.model_key, dtype=ours.dtype) for name in names]


def words_of(row: dict[str, Any]) -> list[str]:
    """What a row of results says of its way that is not as it is by default."""
    found = [row["attention"]] if row.get("attention", "sdp") != "sdp" else []
    found += ["upcast"] if row.get("upcast") else []
    found += [row["dtype"]] if row.get("dtype") else []
    found += [f"without {name.capitalize()}" for name in row.get("without", ())]
    found += [words for name, words in LOSSY.items() if row.get(name)]
    return found + ([f"as {row['as']}"] if row.get("as") else [])


class Ours(engines.StableFast):
    """This extension's accelerator, with less than the machine has."""

    def __init__(self, unet: nn.Module, way: Way) -> None:
        super().__init__(unet, triton=way.triton, faster_sums=way.faster_sums, eight_bits=way.eight_bits)
        self._capability = way.capability

    def call(self) -> torch.Tensor:
        with passing_for(self._capability):
            return super().call()


def card(capability: tuple[int, int]) -> str:
    """As compilers name it: sm_89."""
    return "sm_{}{}".format(*capability)


def check_card(capability: tuple[int, int], device: torch.device) -> None:
    """Whether a device can pass for a GPU of this compute capability.

    Raises:
        Unavailable: it is no GPU, or an older one, or nothing that old is accelerated.
    """
    name = card(capability)
    if device.type != "cuda":
        raise Unavailable(f"there is no NVIDIA GPU that could pass for {name}")
    own = torch.cuda.get_device_capability(device)
    if capability > own:
        raise Unavailable(f"this GPU is {card(own)}: it has not what is used on {name}; name an older one")
    if capability < triton_runtime.MIN_CAPABILITY:
        raise Unavailable(f"nothing older than {card(triton_runtime.MIN_CAPABILITY)} is accelerated, and {name} is")


@contextlib.contextmanager
def passing_for(capability: tuple[int, int] | None) -> Iterator[None]:
    """Kernels are chosen as for GPUs of this compute capability, in all threads; None changes nothing.

    They are compiled for the GPU that is there, and divided among as many multiprocessors as it has.
    """
    if capability is None:
        yield
        return
    room: Any = triton_runtime
    before = room.capability
    try:
        room.capability = lambda device: capability if device.type == "cuda" else (0, 0)
        yield
    finally:
        room.capability = before
