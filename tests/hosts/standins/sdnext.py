"""SD.Next as its stand-in has it, with the extension in it, for the tests of its adapter."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sfast_ext.tools.lib import models

diffusers = pytest.importorskip("diffusers")
hooks = pytest.importorskip("accelerate.hooks")

HERE = Path(__file__).parent
HAS_GROUPS = hasattr(diffusers, "hooks") and hasattr(diffusers.hooks, "apply_group_offloading")
"""Whether diffusers can offload by groups: since 0.33."""
STANDINS = {"july": HERE / "sdnext_root", "august": HERE / "sdnext_august"}
"""SD.Next of July 2026, and of August: its offload is in several modules."""


LEVELS: dict[int, dict[str, Any]] = {
    1: {"block_out_channels": (16,), "down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)},
    2: {
        "block_out_channels": (16, 32),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    },
}
"""Of two levels one has attention and one has none; of one level only the middle block has it."""


def tiny_unet(seed: int = 0, levels: int = 2) -> Any:
    return models.copied(_tiny_unet(seed, levels))


@functools.lru_cache(maxsize=None)
def _tiny_unet(seed: int, levels: int) -> Any:
    unet = diffusers.UNet2DConditionModel(
        **LEVELS[levels],
        sample_size=8,
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=8,
    )
    return models.randomise(unet, seed).eval()


def pipeline(seed: int = 0, levels: int = 2) -> Any:
    return SimpleNamespace(unet=tiny_unet(seed, levels), sd_checkpoint_info=SimpleNamespace(name=f"tiny-{seed}"))


def network(unet: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    adapted = ("to_q", "to_k", "to_v", "ff.net.2", "proj_in")
    layers = {n: m.weight.shape for n, m in unet.named_modules() if n.endswith(adapted)}
    return {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in layers.items()}


class Host:
    """The stand-in, loaded anew, with the extension in it."""

    def __init__(self) -> None:
        self.shared = importlib.import_module("modules.shared")
        self.modeldata = importlib.import_module("modules.modeldata")
        self.script_callbacks = importlib.import_module("modules.script_callbacks")
        self.sd_models = importlib.import_module("modules.sd_models")
        self.sd_models_compile = importlib.import_module("modules.sd_models_compile")
        self.sd_offload = importlib.import_module("modules.sd_offload")
        self.sd_offload_aux = importlib.import_module("modules.sd_offload_aux")
        self.processing = importlib.import_module("modules.processing")
        self.adapter = importlib.import_module("sfast_ext.hosts.sdnext.adapter")
        self.opts.sfast_allow_cpu = True
        self.adapter.start("0.0")

    @property
    def opts(self) -> Any:
        return self.shared.opts

    @property
    def session(self) -> Any:
        return self.adapter.SDNextSession.running

    def status(self) -> dict[str, Any]:
        return self.session.status()

    def captures(self) -> int:
        return self.session.report.counter("captures")

    def runs(self) -> int:
        return self.session.report.counter("eager_runs") + self.session.report.counter("replays")

    def reasons(self) -> str:
        return " | ".join(self.status()["reasons"])

    def image(self, **job: Any) -> torch.Tensor:
        return self.processing.process_images(**job)

    def stock(self, **job: Any) -> torch.Tensor:
        """The same job with the extension switched off."""
        self.opts.sfast_enabled = False
        try:
            return self.image(**job)
        finally:
            self.opts.sfast_enabled = True

    def stock_of(self, seed: int, **job: Any) -> torch.Tensor:
        """The same job of an untouched model."""
        loaded, self.modeldata.model_data.sd_model = self.modeldata.model_data.sd_model, pipeline(seed)
        try:
            return self.stock(**job)
        finally:
            self.modeldata.model_data.sd_model = loaded


def hosted(monkeypatch: pytest.MonkeyPatch, release: str = "july") -> Iterator[Host]:
    """What a fixture `host` gives, for a release of `STANDINS`."""

    def forget() -> None:
        for name in [n for n in sys.modules if n.partition(".")[0] in ("modules", "gradio", "installer")]:
            del sys.modules[name]

    forget()
    for each in dict.fromkeys(("july", release)):
        monkeypatch.syspath_prepend(str(STANDINS[each]))
    found = Host()
    yield found
    # older diffusers have one activation for all models: a hook on it would outlive this one
    for module in vars(found.modeldata.model_data.sd_model or SimpleNamespace()).values():
        if isinstance(module, nn.Module):
            hooks.remove_hook_from_module(module, recurse=True)
    assert not found.script_callbacks.exceptions
    found.adapter.SDNextSession.stop()
    forget()


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
