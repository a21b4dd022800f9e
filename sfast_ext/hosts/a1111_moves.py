"""AUTOMATIC1111's models on their way off the GPU: the memory that it makes free is not to stay with plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sfast_ext.hosts import memory
from sfast_ext.hosts.common import Attachment, wrap
from sfast_ext.report import Report


class Moves:
    """Watches the functions by which the WebUI sends its model to the CPU, or throws it away.

    It does so before it loads another, and counts on the memory. Plans stay for a checkpoint of the same architecture;
    what they read is copied anew at the next call, when the weights are back.

    Args:
        attachment: what holds plans of the models' UNets.
    """

    def __init__(self, attachment: Attachment, unet_of: Callable[[Any], nn.Module | None], report: Report) -> None:
        self._attachment, self._unet_of, self._report = attachment, unet_of, report

    def install(self) -> list[Callable[[], None]]:
        """Lay our functions around the WebUI's; returns what takes them away again."""
        from modules import sd_models

        return [wrap(sd_models, name, self._sent) for name in ("send_model_to_cpu", "send_model_to_trash")]

    def _sent(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        unet = self._unet_of(model)
        was_there = unet is not None and memory.on_gpu(unet)
        result = original(model, *args, **kwargs)
        # under --medvram the UNet has its place on the CPU, and comes and goes in mid-picture
        if unet is not None and was_there and not memory.on_gpu(unet):
            try:
                self._attachment.leave(unet)
            except Exception as exc:
                # in the midst of the host's work, which goes on whatever becomes of ours
                self._report.error("memory", exc)
        return result
