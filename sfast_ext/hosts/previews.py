"""Previews of an image that is being made, decoded by a small network, TAESD or the WebUI's approximation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sfast_ext.hosts.convolution_networks import ConvolutionNetwork
from sfast_ext.hosts.installation import Installation
from sfast_ext.report import Report
from sfast_ext.ui import words
from sfast_ext.ui.settings_table import HostConfig

GAIN = 0.25
"""The part of PyTorch's time that a plan is taken to save before one was timed."""


class Previews:
    """Accelerates the decoder of previews, and has none recorded for gradients."""

    def __init__(self, report: Report, config: Callable[[], HostConfig], guarded: Callable[..., None]) -> None:
        self._network = ConvolutionNetwork("preview", lambda: GAIN, words.preview_words, report, config, guarded)
        self.attachment = self._network.attachment

    def install(self, host: Installation) -> None:
        """Follow TAESD's decoder, which the WebUI asks for before each preview."""
        host.wrap("decoder_model", self._decoder)

    def install_without_gradients(self, host: Installation) -> None:
        """AUTOMATIC1111 decodes previews in the thread of the request that asks for them, in which torch records
        gradients. It takes them off the result, but until then all that the decoder computed is kept."""
        host.wrap("samples_to_images_tensor", self._without_gradients)

    def image_begins(self) -> None:
        """Settings are read again before the next preview."""
        self._network.image_begins()

    def _decoder(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        decoder = original(*args, **kwargs)
        self._network.about_to_run(decoder)
        return decoder

    def _without_gradients(self, original: Callable[..., Any], sample: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(sample, torch.Tensor) and not sample.requires_grad and torch.is_grad_enabled():
            with torch.no_grad():
                return original(sample, *args, **kwargs)
        return original(sample, *args, **kwargs)
