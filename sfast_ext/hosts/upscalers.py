"""Upscalers that consist of convolutions, such as ESRGAN, accelerated tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sfast_ext.hosts.attachment import wrap
from sfast_ext.hosts.convolution_networks import ConvolutionNetwork
from sfast_ext.hosts.installation import Installation
from sfast_ext.report import Report
from sfast_ext.ui import words
from sfast_ext.ui.settings_table import HostConfig

GAIN = 0.25
"""The part of PyTorch's time that a plan is taken to save before one was timed."""


class Upscalers:
    """Accelerates the upscaler that runs. An image is upscaled in tiles of one size, ten or more."""

    def __init__(self, report: Report, config: Callable[[], HostConfig], guarded: Callable[..., None]) -> None:
        self._network = ConvolutionNetwork("upscaler", lambda: GAIN, words.upscaler_words, report, config, guarded)
        self.attachment = self._network.attachment

    def install(self, host: Installation) -> None:
        """Follow what upscales tiles of an image, and images."""
        host.wrap("upscale_pil_patch", self._tile)
        host.wrap("Upscaler.upscale", self._image)
        owner = host.found.place("upscale_pil_patch").owner
        if callable(getattr(owner, "_model", None)):
            # Forge Neo, which puts tiles together on the GPU
            host.add(wrap(owner, "_model", self._tile))

    def _image(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._network.image_begins()
        return original(*args, **kwargs)

    def _tile(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        # what spandrel loads describes a network
        self._network.about_to_run(getattr(model, "model", model))
        return original(model, *args, **kwargs)
