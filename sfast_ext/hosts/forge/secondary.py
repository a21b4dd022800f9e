"""What a Forge runs in addition to the UNet: ControlNets, the VAE and text encoders."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from sfast_ext.config import Config
from sfast_ext.hooks import Hooks
from sfast_ext.hosts import vae
from sfast_ext.hosts.attachment import Attachment
from sfast_ext.hosts.forge.hooks import PartHooks, TextHooks
from sfast_ext.hosts.forge.programs import Program
from sfast_ext.hosts.text_encoders import TextEncoders
from sfast_ext.report import Report
from sfast_ext.ui.settings_table import HostConfig

KEPT_CONTROLNETS = "control_net_model_cache_size"
"""The setting: how many ControlNets the WebUI keeps. Those that it dropped are not held by us either."""


class SecondaryNetworks:
    """Keeps accelerators on ControlNets, on the VAE and on text encoders.

    A ControlNet that runs once for each image (T2I-Adapter), or that is made anew for each (Control-LoRA), has none.

    Args:
        kept: how many ControlNets the WebUI keeps.
        gave_way: asked if the original of a VAE's part is short of memory: whether the WebUI freed some.
    """

    def __init__(
        self, program: Program, report: Report, kept: Callable[[], int], gave_way: Callable[[], bool]
    ) -> None:
        self._program, self._kept, self._gave_way = program, kept, gave_way
        self._networks: list[nn.Module] = []
        self._hooks: dict[int, PartHooks] = {}
        self._vae: Callable[[], nn.Module | None] = _none
        self._text: Callable[[], nn.Module | None] = _none
        self.texts = TextEncoders(self._hooks_for_text, report)
        self.vaes = vae.Vaes(self._hooks_for_vae, report)
        self.controlnets = Attachment(self._hooks_for_network, report, name="controlnet")
        self.attachments: tuple[Attachment, ...] = (
            self.controlnets,
            *self.vaes.attachments,
            *self.texts.attachments,
        )

    def follow_vae(self, model: Any, config: HostConfig) -> nn.Module | None:
        """Accelerate the VAE of the model that is used. Returns it."""
        found = getattr(getattr(getattr(model, "forge_objects", None), "vae", None), "first_stage_model", None)
        found = found if isinstance(found, nn.Module) else None
        # weak: Forge drops it with the model
        self._vae = _none if found is None else weakref.ref(found)
        for each in self.vaes.follow([found], config):
            self._new_pass(each.module)
        return found

    def follow_text(self, model: Any, config: HostConfig) -> None:
        """Accelerate the text encoders of the model that is used."""
        found = getattr(getattr(getattr(model, "forge_objects", None), "clip", None), "cond_stage_model", None)
        found = found if isinstance(found, nn.Module) else None
        self._text = _none if found is None else weakref.ref(found)
        for each in self.texts.follow([found], config):
            self._new_pass(each.module)

    def follow_controlnets(self, unet: Any, config: Config, images: int | None) -> None:
        """Accelerate the ControlNets of a UNet's patcher."""
        used = list(networks_of(unet))
        kept = [each for each in self._networks if not any(each is other for other in used)]
        self._networks = [*used, *kept][: max(self._kept(), len(used))]
        for each in self.controlnets.follow_all(used, config, keep=self._networks):
            if each is not None:
                self._new_pass(each.module, images)
                each.new_generation()

    def name_images(self, images: int | None) -> None:
        """For the words of ControlNets."""
        for hooks in self._hooks.values():
            hooks.images = images

    def release(self) -> None:
        """Forget all networks; their accelerators are the session's to release."""
        self._networks, self._vae, self._text = [], _none, _none
        self.texts.release()
        self._hooks.clear()

    def _new_pass(self, module: nn.Module, images: int | None = None) -> None:
        hooks = self._hooks.get(id(module))
        if hooks is not None:
            hooks.images = images
            hooks.new_pass()

    def _hooks_for_vae(self, part: nn.Module, named: Callable[[Sequence[tuple[int, ...]]], str | None]) -> Hooks:
        hooks = self._made(part, lambda: self._vae(), named, vae.MARKS)
        return replace(hooks, short_of_memory=self._gave_way)

    def _hooks_for_text(self, module: nn.Module) -> Hooks:
        return self._keep(module, TextHooks(module, lambda: self._text(), self._program)).hooks()

    def _hooks_for_network(self, network: nn.Module) -> Hooks:
        # Forge loads and patches the network itself
        return self._made(network, weakref.ref(network))

    def _made(self, part: nn.Module, holder: Callable[[], Any], named: Any = None, ignored: Any = frozenset()) -> Hooks:
        return self._keep(part, PartHooks(part, holder, self._program, named, ignored)).hooks()

    def _keep(self, part: nn.Module, hooks: PartHooks) -> PartHooks:
        self._hooks = {key: each for key, each in self._hooks.items() if each.alive()}
        self._hooks[id(part)] = hooks
        return hooks


def _none() -> None:
    """There is no VAE."""


def networks_of(unet: Any) -> list[nn.Module]:
    """The ControlNets in the list of a UNet's patcher that run at each step and stay loaded between images."""
    found: list[nn.Module] = []
    control = getattr(unet, "controlnet_linked_list", None)
    while control is not None:
        network = getattr(control, "control_model", None)
        stays = type(control).__name__ == "ControlNet" and hasattr(network, "zero_convs")
        if stays and isinstance(network, nn.Module) and not any(network is each for each in found):
            found.append(network)
        control = getattr(control, "previous_controlnet", None)
    return found
