"""The WebUIs that `images.py` measures: their models, their start, and what a request of theirs says."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

WAYS: dict[str, dict[str, Any]] = {
    "stock": {},
    "unet": {"sfast_vae": False, "sfast_png": False},
    "pillow": {"sfast_png": False},
    "no-text": {"sfast_text_encoders": False},
    "eight": {"sfast_eight_bits": True},
    "ahead": {"sfast_ahead": True},
    "earlier": {},
    "extended": {},
}
"""Settings of the WebUI for each way: without the extension, with the UNet alone accelerated, with all but
PNG files, with all but the text encoders, in 8 bits, prepared after the start, with an earlier state of the extension,
with all."""
EXTENSION, EARLIER = "stable-fast", "stable-fast-earlier"
"""The folders of this checkout and of an earlier one among the WebUI's extensions."""
PROBE = Path(__file__).with_name("probe.py")
FACES = Path(__file__).with_name("faces.py")
SMALL_CARD = Path(__file__).with_name("small_card")
"""Packages that make the GPU of a WebUI a small one."""
LARGE = {"sd15": "full", "sdxl": "full-xl"}
"""Names of the checkpoints of random weights."""
LOADED, LOADING_S = "Model loaded in", 120
"""What AUTOMATIC1111 prints then, and seconds that it is waited for."""


class Host(Protocol):
    """A WebUI with its models in a folder."""

    variable: str
    """The environment variable that says where it is."""
    hires: dict[str, Any]
    """What a request says for an image of twice its size."""

    def start(self, way: str, number: int, flags: str) -> Any:
        """A `WebUI`; no other has this way and number."""

    def data_of(self, way: str, number: int) -> Path:
        """The folder with the extensions of that `WebUI`."""

    def ready(self, webui: Any) -> None:
        """Wait until it can make images."""


def small_card(gib: float | None) -> Path | None:
    """For WebUIs on a card of so many GiB, the packages that they find beside their own; None for the GPU as it is."""
    if gib is None:
        return None
    os.environ["SFAST_CARD_GIB"] = str(gib)
    return SMALL_CARD


def disabled(way: str) -> dict[str, Any]:
    """The setting that leaves a way the extension that it has, and none if it has none."""
    own = {"stock": None, "earlier": EARLIER}.get(way, EXTENSION)
    return {"disabled_extensions": [each for each in (EXTENSION, EARLIER) if each != own]}


def kept(options: argparse.Namespace) -> Path | None:
    """The folder in which models of random weights stay for the next run, if one is named."""
    folder: Path | None = getattr(options, "models", None)
    return folder and folder.resolve()


def linked(checkpoint: Path, folder: Path) -> str:
    """A checkpoint of the user's, put into a folder. Its name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / checkpoint.name).symlink_to(checkpoint.resolve())
    return checkpoint.name


class A1111:
    """AUTOMATIC1111's WebUI, see `tests/hosts/live/a1111.py`."""

    variable = "SFAST_A1111_DIR"
    hires = {"enable_hr": True, "hr_scale": 2, "hr_upscaler": "Latent", "denoising_strength": 0.7}
    tiny = "tiny"
    """The checkpoint of --tiny."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        from tests.hosts.live import a1111, webui

        models, self.data = kept(options) or folder / "models", folder / "data"
        models.mkdir(parents=True, exist_ok=True)
        if options.checkpoint is None:
            made = self.tiny if options.tiny else LARGE[options.model]
            checkpoint = f"{made}.safetensors"
            if not (models / "Stable-diffusion" / checkpoint).exists():
                self.make_models(models, *([] if options.tiny else [made]))
        else:
            checkpoint = linked(options.checkpoint, models / "Stable-diffusion")
        self.data.mkdir()
        a1111.make_data(self.data, models, vae_plans=options.vae_plans_at_once)
        webui.add_extension(self.data, "sfast-probe", PROBE.read_text(encoding="utf-8"))
        webui.add_extension(self.data, "sfast-faces", FACES.read_text(encoding="utf-8"))
        self.settings = {"sd_model_checkpoint": checkpoint, "sfast_allow_cpu": options.tiny}
        self.packages = small_card(options.card)
        if getattr(options, "earlier", None):
            (self.data / "extensions" / EARLIER).symlink_to(options.earlier.resolve(), target_is_directory=True)

    def make_models(self, folder: Path, *large: str) -> None:
        """Fill a folder with tiny models, or with the large one of this name."""
        from tests.hosts.live import a1111

        a1111.make_models(folder, *large)

    def start(self, way: str, number: int, flags: str) -> Any:
        """See `Host`."""
        return self.started(f"{way}-{number}", {**self.settings, **WAYS[way], **disabled(way)}, flags)

    def data_of(self, way: str, number: int) -> Path:
        """See `Host`."""
        return self.data

    def started(self, name: str, settings: dict[str, Any], flags: str) -> Any:
        """A `WebUI` with these settings."""
        from tests.hosts.live import a1111

        return a1111.start(self.data, name, settings, flags=flags, packages=self.packages)

    def ready(self, webui: Any) -> None:
        """See `Host`. With --medvram an image that is asked for while the model is loaded can fail in the WebUI alone:
        two threads move the model."""
        until = time.monotonic() + LOADING_S
        while LOADED not in webui.log() and time.monotonic() < until:
            time.sleep(0.1)


class SDNext:
    """SD.Next with the settings that it comes with, see `tests/hosts/live/sdnext.py`."""

    variable = "SFAST_SDNEXT_DIR"
    hires = {
        "enable_hr": True, "hr_scale": 2, "hr_upscaler": "Latent Bilinear", "hr_force": True, "hr_resize_mode": 1,
        "hr_denoising_strength": 0.7,
    }  # fmt: skip

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        from tests.hosts.live import sdnext

        self.module, self.folder, self.models = sdnext, folder, kept(options) or folder / "models"
        if options.checkpoint is None:
            checkpoint = f"Diffusers/{'tiny-a' if options.tiny else LARGE[options.model]}"
            if not (self.models / checkpoint).exists():
                sdnext.make_models(self.models, *([] if options.tiny else [options.model]))
        else:
            checkpoint = linked(options.checkpoint, self.models / "Stable-diffusion")
        self.device = "--use-cpu all" if options.tiny else ""
        self.packages = small_card(options.card)
        needed = ("offline_mode", "sdnq_dequantize_compile", "server_rate_limit", "samples_save")
        self.settings = {name: sdnext.SETTINGS[name] for name in needed}
        self.settings |= {"sd_model_checkpoint": checkpoint, "sfast_allow_cpu": options.tiny}
        self.vae_plans_at_once = options.vae_plans_at_once

    def start(self, way: str, number: int, flags: str) -> Any:
        """See `Host`."""
        from tests.hosts.live import webui

        data = self.data_of(way, number)
        data.mkdir()
        (data / "models").symlink_to(self.models, target_is_directory=True)
        webui.add_extension(data, "sfast-probe", PROBE.read_text(encoding="utf-8"))
        if self.vae_plans_at_once:
            webui.add_extension(data, "vae-plans", webui.VAE_PLANS)
        settings, extension = {**self.settings, **WAYS[way]}, way != "stock"
        return self.module.start(
            data, settings, extension=extension, flags=flags, device=self.device, common={}, packages=self.packages
        )

    def data_of(self, way: str, number: int) -> Path:
        """See `Host`."""
        return self.folder / f"{way}-{number}"

    def ready(self, webui: Any) -> None:
        """See `Host`."""
        self.module.model_loaded(webui)


class ForgeNeo(A1111):
    """Forge Neo, see `tests/hosts/live/forge.py`."""

    variable = "SFAST_FORGE_DIR"
    # it has no upscalers of latents
    hires = {
        **A1111.hires, "hr_upscaler": "None", "hr_cfg_scale": 7.0, "hr_additional_modules": ["Use same choices"]
    }  # fmt: skip
    tiny = "one"
    program = "NEO"
    """Which Forge it is, by its name there."""

    def ready(self, webui: Any) -> None:
        """See `Host`: it is when it answers."""

    def make_models(self, folder: Path, *large: str) -> None:
        """See `A1111`."""
        from tests.hosts.live import forge

        forge.make_models(folder, getattr(forge, self.program), *large)

    def started(self, name: str, settings: dict[str, Any], flags: str) -> Any:
        """See `A1111`."""
        from tests.hosts.live import forge

        webui = forge.start(self.data, name, settings, getattr(forge, self.program), flags, self.packages)
        if name.startswith("unet-"):
            webui.env["SFAST_PROBE_UNET_ALONE"] = "1"
        return webui


class ForgeClassic(ForgeNeo):
    """Forge Classic."""

    variable = "SFAST_FORGE_CLASSIC_DIR"
    hires = {**A1111.hires, "hr_cfg_scale": 7.0}
    program = "CLASSIC"


class Forge(ForgeNeo):
    """Forge by lllyasviel."""

    variable = "SFAST_FORGE_OLD_DIR"
    hires = {**A1111.hires, "hr_cfg": 7.0, "hr_additional_modules": ["Use same choices"]}
    program = "OLD"


class ReForge(ForgeNeo):
    """reForge."""

    variable = "SFAST_REFORGE_DIR"
    hires = A1111.hires
    program = "REFORGE"


HOSTS: dict[str, type[A1111] | type[SDNext]] = {
    "a1111": A1111,
    "sdnext": SDNext,
    "forge-neo": ForgeNeo,
    "forge-classic": ForgeClassic,
    "forge": Forge,
    "reforge": ReForge,
}


def run(options: argparse.Namespace, measure: Callable[[argparse.Namespace, Path], dict[str, Any]]) -> dict[str, Any]:
    """What is measured in a WebUI, with a folder for its data.

    Raises:
        SystemExit: no WebUI is named.
    """
    variable = HOSTS[options.host].variable
    if not os.environ.get(variable):
        raise SystemExit(f"a WebUI is needed: {variable} names none")
    # the tests' WebUIs get by with one
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    with tempfile.TemporaryDirectory(prefix="sfast-") as folder:
        return measure(options, Path(folder))
