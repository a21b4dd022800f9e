"""Small networks of convolutions that make images next to the VAE: upscalers and decoders of previews."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from sfast_ext.hooks import Hooks
from sfast_ext.hosts.attachment import Attachment, is_host_code, wraps_torchs
from sfast_ext.hosts.host_queue import interrupted
from sfast_ext.reasons import text
from sfast_ext.report import Report
from sfast_ext.secondary_report import SecondaryReport
from sfast_ext.ui.settings_table import HostConfig

MAX_PLANS = 4
"""Tiles of one image have one size, and so have previews; smaller images one for each."""
MAX_BYTES = 256 << 20
"""Of weights. Those of the network that ran last stay on the GPU: ESRGAN has 33 MB in half precision, TAESD 2 MB."""
_WEIGHTS = (nn.Conv2d, nn.PReLU)

Named = Callable[[Sequence[tuple[int, ...]]], str | None]
"""Names a call in a user's words, of the shapes of its tensors."""


class ConvolutionNetwork:
    """Keeps an accelerator on the network of one kind that the host is about to run. The host may load it anew; its
    plans then go to the new one. They have no CUDA graph and are made once they pay, see `Config.rare_calls`.

    Args:
        name: of the kind; the first word of the counters of its calls as well.
        gain: the part of PyTorch's time that a plan is taken to save.
        config: gives the settings.
        guarded: runs an action whose exceptions go to the report.
    """

    def __init__(
        self,
        name: str,
        gain: Callable[[], float],
        named: Named,
        report: Report,
        config: Callable[[], HostConfig],
        guarded: Callable[..., None],
    ) -> None:
        self._gain, self._config, self._guarded = gain, config, guarded
        self.attachment: Attachment = _Attachment(name, named, report)
        self._last: weakref.ref[nn.Module] | None = None

    def image_begins(self) -> None:
        """Settings are read again before the next call."""
        self._last = None

    def about_to_run(self, network: Any) -> None:
        """Accelerate this network if it is one of convolutions, and release the one before it."""
        if isinstance(network, nn.Module) and (self._last is None or self._last() is not network):
            self._guarded(lambda: self._follow(network))

    def _follow(self, network: nn.Module) -> None:
        self._last = weakref.ref(network)
        config = self._config()
        config = replace(
            config,
            enabled=config.enabled and config.vae,
            cuda_graphs=False,
            rare_calls=True,
            rare_gain=self._gain(),
            faster_sums=False,
            eight_bits=False,
            max_plans=min(config.max_plans, MAX_PLANS),
        )
        accelerator = self.attachment.follow(network if is_known(network) else None, config)
        if accelerator is not None:
            accelerator.new_generation()


class _Attachment(Attachment):
    """Its calls are no steps."""

    def __init__(self, name: str, named: Named, report: Report) -> None:
        self._secondary = SecondaryReport(report, name, name)
        hooks = Hooks(recognised=_vouch, words=named, interrupted=interrupted)
        super().__init__(lambda network: hooks, self._secondary, name=name)

    def status(self) -> list[dict[str, Any]]:
        """As of other networks. "idle" is why the last call was bypassed."""
        return [{**each, "idle": text(self._secondary.reason), "steps": False} for each in super().status()]


def _vouch(module: nn.Module, kind: str, function: object) -> bool:
    """For what the WebUI itself does to classes: Forge Neo gives ESRGAN's blocks a forward that needs less memory."""
    return kind in ("class", "function", "replaced") and (is_host_code(function) or wraps_torchs(function))


def is_known(network: nn.Module) -> bool:
    """Whether it is a network of convolutions, which all the weights belong to, and not a large one."""
    held = [module for module in network.modules() if module._parameters or module._buffers]
    weights = list(network.parameters())
    if not weights or not all(isinstance(module, _WEIGHTS) for module in held):
        return False
    return sum(weight.numel() * weight.element_size() for weight in weights) <= MAX_BYTES
