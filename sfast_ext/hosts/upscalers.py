"""Upscalers that consist of convolutions, such as ESRGAN, accelerated tile by tile; the same for all adapters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from sfast_ext.hooks import Hooks
from sfast_ext.hosts.attachment import Attachment, is_host_code, wrap, wraps_torchs
from sfast_ext.hosts.host_queue import interrupted
from sfast_ext.hosts.installation import Installation
from sfast_ext.reasons import text
from sfast_ext.report import Report
from sfast_ext.secondary_report import SecondaryReport
from sfast_ext.ui import words
from sfast_ext.ui.settings_table import HostConfig

MAX_PLANS = 4
"""Tiles of one image have one size, smaller images one for each."""
MAX_BYTES = 256 << 20
"""Of weights. Those of the last upscaler stay on the GPU: ESRGAN has 33 MB in half precision."""
GAIN = 0.25
"""The part of PyTorch's time that a plan is taken to save before one was timed."""
COUNTED = "upscaler"
"""The first word of the counters of their calls."""
_WEIGHTS = (nn.Conv2d, nn.PReLU)


class Upscalers:
    """Keeps an accelerator on the upscaler that runs. The WebUI may load it anew for each image; its plans then go to
    the new one.

    An image is upscaled in tiles of one size, ten or more, so plans have no CUDA graph and are made once they pay; see
    `Config.rare_calls`.
    """

    def __init__(self, report: Report, config: Callable[[], HostConfig], guarded: Callable[..., None]) -> None:
        self._secondary = SecondaryReport(report, COUNTED, "upscaler")
        self._config, self._guarded = config, guarded
        self.attachment: Attachment = _Attachment(self._secondary)
        self._last: weakref.ref[nn.Module] | None = None

    def install(self, host: Installation) -> None:
        """Follow what upscales tiles of an image, and images."""
        host.wrap("upscale_pil_patch", self._tile)
        host.wrap("Upscaler.upscale", self._image)
        owner = host.found.place("upscale_pil_patch").owner
        if callable(getattr(owner, "_model", None)):
            # Forge Neo, which puts tiles together on the GPU
            host.add(wrap(owner, "_model", self._tile))

    def _image(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # settings are read once for each image
        self._last = None
        return original(*args, **kwargs)

    def _tile(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        network = getattr(model, "model", model)
        if self._last is None or self._last() is not network:
            self._guarded(lambda: self.follow(network))
        return original(model, *args, **kwargs)

    def follow(self, network: Any) -> None:
        """Accelerate this network if it is one of convolutions, and release the one before it."""
        if not isinstance(network, nn.Module):
            return
        self._last = weakref.ref(network)
        config = self._config()
        config = replace(
            config,
            enabled=config.enabled and config.vae,
            cuda_graphs=False,
            rare_calls=True,
            rare_gain=GAIN,
            faster_sums=False,
            eight_bits=False,
            max_plans=min(config.max_plans, MAX_PLANS),
        )
        accelerator = self.attachment.follow(network if is_known(network) else None, config)
        if accelerator is not None:
            accelerator.new_generation()


class _Attachment(Attachment):
    """Its calls are no steps."""

    def __init__(self, report: SecondaryReport) -> None:
        self._secondary = report
        hooks = Hooks(recognised=_vouch, words=_named, interrupted=interrupted)
        super().__init__(lambda network: hooks, report, name="upscaler")

    def status(self) -> list[dict[str, Any]]:
        """As of other networks. "idle" is why the last call was bypassed."""
        return [{**each, "idle": text(self._secondary.reason), "steps": False} for each in super().status()]


def _vouch(module: nn.Module, kind: str, function: object) -> bool:
    """For what the WebUI itself does to classes: Forge Neo gives ESRGAN's blocks a forward that needs less memory."""
    return kind in ("class", "function", "replaced") and (is_host_code(function) or wraps_torchs(function))


def _named(shapes: Sequence[tuple[int, ...]]) -> str | None:
    return words.upscaler_words(shapes)


def is_known(network: nn.Module) -> bool:
    """Whether it is a network of convolutions, which all the weights belong to, and not a large one."""
    held = [module for module in network.modules() if module._parameters or module._buffers]
    weights = list(network.parameters())
    if not weights or not all(isinstance(module, _WEIGHTS) for module in held):
        return False
    return sum(weight.numel() * weight.element_size() for weight in weights) <= MAX_BYTES
