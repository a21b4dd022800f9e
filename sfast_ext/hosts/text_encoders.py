"""The text encoders, accelerated in addition to the UNet; the same for all adapters.

The embeddings of tokens stay the host's own: the host puts the vectors of textual inversion among them. What is
accelerated is what comes next: the layers of transformers' encoder, or the blocks of OpenCLIP's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from sfast_ext.accelerator import Accelerator
from sfast_ext.behaviour.recorded_outputs import collects
from sfast_ext.hooks import Hooks, Read
from sfast_ext.hosts.attachment import Attachment
from sfast_ext.hosts.open_clip_towers import Tower, Towers, is_embedder
from sfast_ext.reasons import text
from sfast_ext.report import Report
from sfast_ext.secondary_report import SecondaryReport
from sfast_ext.ui import words
from sfast_ext.ui.settings_table import HostConfig

NAME = "text encoder"
MAX_PLANS = 8
"""Kept for each. How many prompts are encoded at once makes the sizes."""
MANY_GRAPHS = 8
"""If fewer CUDA graphs are kept ready, as on a small card, all of them are for sizes of images."""
GAIN = 0.7
"""On an NVIDIA H200 a CUDA graph saves 0.73 to 0.79 of PyTorch's time."""
BUILD_MS = 500.0
"""What a plan takes there, once its kernels are compiled."""
COUNTED = "text"
"""The first word of the counters of their calls."""

_SWITCHES = frozenset({"output_hidden_states", "output_attentions"})
"""Of transformers' encoder, which only asks whether they are on. AUTOMATIC1111 gives a number of layers."""

TextHooks = Callable[[nn.Module], Hooks]
"""Makes the hooks of the accelerator of a module in a text encoder."""


class _Attachment(Attachment):
    """The accelerators of all text encoders. Their calls are no steps."""

    def __init__(self, hooks_for: TextHooks, report: Report) -> None:
        self._secondary = SecondaryReport(report, COUNTED, NAME)
        super().__init__(hooks_for, self._secondary, name=NAME)

    def among(self, modules: Container[int]) -> list[Accelerator]:
        """See `Attachment.among`. A tower is in no other module; its blocks are."""
        return [each for each in self.accelerators() if id(_place(each.module)) in modules]

    def status(self) -> list[dict[str, Any]]:
        """As of other networks. "idle" is why the last call was bypassed."""
        return [{**each, "idle": text(self._secondary.reason), "steps": False} for each in super().status()]


class TextEncoders:
    """Keeps accelerators on the text encoders that a host is about to use.

    A prompt is encoded once, and the host keeps the result for as long as the prompt stays; see `Config.rare_calls`.
    """

    def __init__(self, hooks_for: TextHooks, report: Report) -> None:
        def named(module: nn.Module) -> Hooks:
            return replace(hooks_for(module), words=words.text_words, arguments=_switches)

        self._attachment, self._towers = _Attachment(named, report), Towers()
        self.attachments: tuple[Attachment, ...] = (self._attachment,)

    def follow(self, encoders: Iterable[Any], config: HostConfig) -> list[Accelerator]:
        """Accelerate what is in these modules as `config` says, and release all others. Call it before each image,
        before its prompts are encoded.

        Args:
            encoders: modules that have the text encoders, and no network of another kind.

        Returns:
            The accelerators. A new generation of theirs has begun.
        """
        config = replace(
            config,
            enabled=config.enabled and config.text_encoders,
            cuda_graphs=config.cuda_graphs and config.max_graphs >= MANY_GRAPHS,
            rare_calls=True,
            rare_gain=GAIN,
            rare_build_ms=BUILD_MS,
            # all steps of an image depend on the prompt's encoding
            faster_sums=False,
            eight_bits=False,
            max_plans=min(config.max_plans, MAX_PLANS),
        )
        found: list[nn.Module] = []
        if config.enabled:
            for encoder in encoders:
                found += [each for each in self._within(encoder) if not any(each is other for other in found)]
        followed = [each for each in self._attachment.follow_all(found, config) if each is not None]
        if not found:
            self._towers.release()
        for each in followed:
            each.new_generation()
        return followed

    def _within(self, encoder: Any) -> Iterator[nn.Module]:
        inside: set[int] = set()
        for module in encoder.modules() if isinstance(encoder, nn.Module) else ():
            if id(module) in inside:
                continue
            if is_embedder(module):
                found = self._towers.tower_of(module)
            else:
                found = layers_of(module)
            if found is not None:
                inside.update(map(id, module.modules()))
                yield found

    def suspend(self, module: nn.Module | None = None) -> None:
        """See `Attachment.suspend`."""
        self._attachment.suspend(module)

    def among(self, modules: Container[int]) -> list[Accelerator]:
        """See `Attachment.among`."""
        return self._attachment.among(modules)

    def give_memory_back(self) -> None:
        """See `Attachment.give_memory_back`."""
        self._attachment.give_memory_back()

    def release(self) -> None:
        """Release all."""
        self._attachment.release()
        self._towers.release()


def _switches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Read:
    """The arguments of a call, with numbers that are only switches as those."""
    if not any(type(kwargs.get(name)) is int for name in _SWITCHES):
        return args, kwargs
    return args, {k: bool(v) if k in _SWITCHES and type(v) is int else v for k, v in kwargs.items()}


def _place(module: nn.Module) -> nn.Module:
    """What a host moves, of an accelerated module."""
    return module.model.transformer if isinstance(module, Tower) else module


def layers_of(module: nn.Module) -> nn.Module | None:
    """What is accelerated of a text model; None if the module is none that is known.

    That is its encoder, whose results are all hidden states. From transformers 5 on they are recorded by hooks for the
    forward of the text model, which then is accelerated as a whole, unless its embeddings are not torch's. ComfyUI's
    encoder writes to its argument, which no plan repeats.
    """
    encoder = getattr(module, "encoder", None)
    parts = (getattr(module, name, None) for name in ("embeddings", "final_layer_norm"))
    if not all(isinstance(part, nn.Module) for part in (encoder, *parts)):
        return None
    layers = getattr(encoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not all(map(_is_layer, layers)) or not len(layers):
        return None
    if collects(module):
        return module if type(getattr(module.embeddings, "token_embedding", None)) is nn.Embedding else None
    return encoder if _read(encoder) >= {"inputs_embeds", "output_hidden_states"} else None


def _is_layer(layer: nn.Module) -> bool:
    return all(isinstance(getattr(layer, name, None), nn.Module) for name in ("self_attn", "mlp", "layer_norm1"))


def _read(module: Any) -> set[str]:
    """The parameters of a module's forward, by those of its class: another forward may lie over it."""
    try:
        return set(inspect.signature(type(module).forward).parameters)
    except (TypeError, ValueError):
        return set()
