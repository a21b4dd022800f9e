"""Each kind of session with its host's stand-in, for tests that go through all of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sfast_ext import hosts
from sfast_ext.hosts.session import Session

STEPS = 2


@dataclass
class World:
    """A host in this process, without the extension, with a model of one level.

    Args:
        load: loads the model, with the host's events.
        unet: gives the loaded UNet.
        make: makes an image.
        callbacks: the host's lists of callbacks by name.
        fire: calls the callbacks of a name.
    """

    load: Callable[[], object]
    unet: Callable[[], nn.Module]
    make: Callable[[], torch.Tensor]
    callbacks: dict[str, list[Any]]
    fire: Callable[..., object]

    @property
    def opts(self) -> Any:
        """The host's settings, unless a test has taken them away."""
        return sys.modules["modules.shared"].opts


def kinds() -> list[type[Session]]:
    """The session classes of all adapters."""
    return [kind for name in hosts.ADAPTERS for kind in adapter_of(name).SESSIONS]


def adapter_of(name: str) -> ModuleType:
    """An adapter, by the name of its folder."""
    return importlib.import_module(f"sfast_ext.hosts.{name}.adapter")


@contextmanager
def world_of(kind: type[Session]) -> Iterator[World]:
    """The host of a kind of session. The extension is stopped at the end."""
    try:
        with WORLDS[kind.__name__]() as world:
            yield world
    finally:
        for each in kinds():
            each.stop()


@contextmanager
def _ldm(name: str) -> Iterator[World]:
    pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit")
    standin = importlib.import_module(f"hosts.standins.{name}")
    with standin.running(sfast_allow_cpu=True) as host:

        def unet() -> nn.Module:
            model = host.model_data.sd_model
            return model.model.diffusion_model if name == "a1111" else host.unet

        yield World(lambda: host.load(1), unet, lambda: host.generate(steps=STEPS), host.callbacks, host.fire)
        assert host.errors == []


@contextmanager
def _sdnext() -> Iterator[World]:
    pytest.importorskip("diffusers")
    standin = importlib.import_module("hosts.standins.sdnext")

    def forget() -> None:
        for name in [n for n in sys.modules if n.partition(".")[0] in ("modules", "gradio", "installer")]:
            del sys.modules[name]

    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(standin.STANDINS["july"]))
        names = ("script_callbacks", "sd_models", "processing", "shared")
        host = SimpleNamespace(**{name: importlib.import_module(f"modules.{name}") for name in names})
        for name in ("modeldata", "ipadapter", "sd_offload_aux", "sd_models_compile", "scripts"):
            importlib.import_module(f"modules.{name}")
        importlib.import_module("modules.generation_parameters_copypaste")
        importlib.import_module("installer")
        host.shared.opts.sfast_allow_cpu = True
        pipe = standin.pipeline(1, levels=1)
        yield World(
            lambda: host.sd_models.load_model(pipe),
            lambda: pipe.unet,
            lambda: host.processing.process_images(steps=STEPS),
            host.script_callbacks.callback_map,
            host.script_callbacks.fire,
        )
        assert host.script_callbacks.exceptions == []
    forget()


WORLDS: dict[str, Callable[[], Any]] = {
    "A1111Session": lambda: _ldm("a1111"),
    "SDNextSession": _sdnext,
    "ForgeSession": lambda: _ldm("forge_neo_memory"),
    "ClassicSession": lambda: _ldm("forge_classic"),
    "OldSession": lambda: _ldm("forge_old_memory"),
    "ReforgeSession": lambda: _ldm("reforge"),
}
"""By the name of the session class. `test_probes.py` fails on a class that has none."""

