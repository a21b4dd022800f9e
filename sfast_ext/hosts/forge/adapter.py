"""The programs that are called Forge: where their networks are, when these change, and what must not be accelerated."""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

from torch import nn

from sfast_ext.config import Config
from sfast_ext.hooks import Hooks
from sfast_ext.hosts import reasons, starting
from sfast_ext.hosts.attachment import Attachment
from sfast_ext.hosts.forge import probes, residence
from sfast_ext.hosts.forge.hooks import ForgeHooks
from sfast_ext.hosts.forge.memory import ClassicMemory, ForgeMemory, OldMemory, ReforgeMemory
from sfast_ext.hosts.forge.programs import CLASSIC, FORGE, NEO, REFORGE, Program
from sfast_ext.hosts.forge.residence import Residence
from sfast_ext.hosts.forge.resident import ResidentUnet
from sfast_ext.hosts.forge.resident_layers import ResidentLayers
from sfast_ext.hosts.forge.resident_models import ResidentModels
from sfast_ext.hosts.forge.secondary import KEPT_CONTROLNETS, SecondaryNetworks
from sfast_ext.hosts.forge.vae_room import VaeRoom
from sfast_ext.hosts.probes import Examined
from sfast_ext.hosts.webui_session import WebUISession
from sfast_ext.reasons import Reason


def detect() -> bool:
    """Whether this process is one of the programs that are called Forge."""
    try:
        return importlib.util.find_spec("modules_forge") is not None
    except (ImportError, ValueError):
        return False


class ForgeSession(WebUISession):
    """The extension in one run of the WebUI's scripts; see `Session`."""

    PROGRAM: ClassVar[Program] = NEO
    HOST = "Forge Neo"
    FOLLOWS_RESIDENCE = True
    PROBES = probes.NEO
    TESTED = ("neo 2.26",)
    NAME: ClassVar[str] = "neo"
    """What the program calls itself."""
    RESIDENCE: ClassVar[Residence] = residence.NEO
    _make_memory: ClassVar[type[ForgeMemory]] = ForgeMemory
    _make_resident: ClassVar[type[ResidentUnet]] = ResidentLayers

    def __init__(self, version: str, found: Examined | None = None) -> None:
        super().__init__(version, found)
        self._unets = Attachment(self._hooks_for, self.report)
        self._secondary = SecondaryNetworks(
            self.PROGRAM, self.report, self._kept_controlnets, lambda: self._vae_room.gave_way()
        )
        small = (self._upscalers.attachment, self._previews.attachment)
        self.attachments = (self._unets, *self._secondary.attachments, *small)
        self._memory = self._make_memory((*self._secondary.attachments, self._unets), self.report)
        self._vae_room = VaeRoom(self._memory.make_room, self.report)
        self._resident = self._make_resident(
            self.RESIDENCE, self._unets, self.config, self._memory.unrestored, self._attach, self.report
        )

    @classmethod
    def is_host(cls) -> bool:
        """Whether the program calls itself so."""
        return _version() == cls.NAME

    def _kept_controlnets(self) -> int:
        kept = getattr(self.found["opts"], "data", {}).get(KEPT_CONTROLNETS, 5)
        return kept if isinstance(kept, int) else 1

    def _follow_vae(self, model: Any) -> None:
        if self._has_vae:
            config = self.config()
            found = self._secondary.follow_vae(model, config)
            self._memory.watch(found if config.enabled else None)
            self._secondary.follow_text(model, config)

    def _install_memory(self) -> None:
        super()._install_memory()
        host = self.installation
        self._memory.install(host)
        if not self.FOLLOWS_RESIDENCE:
            return
        host.feature(probes.VAE_ROOM, lambda: self._vae_room.install(host))
        if host.feature(probes.RESIDENT, lambda: self._resident.install(host)):
            host.feature(probes.LORA_NAMES, lambda: self._resident.install_names(host))

    def follows_residence(self) -> bool:
        """If Forge's functions are those that are known, and the card has room for the UNet as a whole."""
        return self._resident.follows(self.unet_of(self.model()))

    def host_version(self) -> str:
        """What the program calls itself, and its release if it has one."""
        return " ".join(filter(None, (_version(), _release())))

    def subpath(self) -> str:
        """That of --subpath."""
        from modules import shared

        path = str(getattr(shared.cmd_opts, "subpath", None) or "").strip("/")
        return f"/{path}" if path else ""

    def unet_of(self, model: Any) -> nn.Module | None:
        """The network that makes the steps."""
        return unet_of(model)

    def name_images(self, images: int | None) -> None:
        """For the words of all networks."""
        super().name_images(images)
        self._secondary.name_images(images)

    def release_models(self) -> None:
        """Release every network that is accelerated."""
        self._resident.before(Config(enabled=False), None)
        super().release_models()
        self._secondary.release()

    def _hooks_for(self, unet: nn.Module) -> Hooks:
        hooks = self._hooks.get(unet)
        if hooks is None:
            resident = self._resident if self.FOLLOWS_RESIDENCE else None
            hooks = self._hooks[unet] = ForgeHooks(unet, lambda: holder_of(self.model()), self.PROGRAM, resident)
        return hooks.hooks()

    def _attach(self, unet: nn.Module) -> None:
        config, model = self.config(), self.model()
        if config.enabled and config.eight_bits and unet_of(model) is unet and self._model_bypass_reason(model) is None:
            self._resident.before(config, unet)
            self._unets.follow(unet, config)

    def _follow(self, model: Any) -> None:
        self.report.new_generation()
        config = self.config()
        unet = unet_of(model)
        reason = self._model_bypass_reason(model) if config.enabled else None
        if reason is not None:
            self.report.bypassed(reason)
            unet = None
        self._resident.before(config if unet is not None else Config(enabled=False), unet)
        accelerator = self._unets.follow(unet, config)
        self._follow_vae(model)
        if self.found.has(probes.CONTROLNET):
            patcher = getattr(getattr(model, "forge_objects", None), "unet", None)
            self._secondary.follow_controlnets(None if unet is None else patcher, config, self._images)
        self._begin_pass(accelerator)

    def _model_bypass_reason(self, model: Any) -> Reason | None:
        unet = unet_of(model)
        if unet is None:
            return None
        compiled = hasattr(unet, "_orig_mod")
        if compiled or _call_is_replaced(holder_of(model)):
            # Forge's torch.compile would compile our forward
            return reasons.CALL_REPLACED()
        if type(unet).__name__ not in self.PROGRAM.networks:
            kind = reasons.NO_UNET if len(self.PROGRAM.networks) > 1 else reasons.ONLY_UNETS
            return kind(type(unet).__name__)
        return None


class ClassicSession(ForgeSession):
    """The same in Forge Classic."""

    PROGRAM = CLASSIC
    HOST = "Forge Classic"
    FOLLOWS_RESIDENCE = False
    PROBES = probes.CLASSIC
    # it has no release
    TESTED = ("classic",)
    NAME = "classic"
    _make_memory = ClassicMemory
    running = None


class OldSession(ForgeSession):
    """The same in Forge, from which the others derive."""

    PROGRAM = FORGE
    HOST = "Forge"
    RESIDENCE = residence.FORGE
    PROBES = probes.FORGE
    TESTED = ("2.0.1",)
    _make_memory = OldMemory
    _make_resident = ResidentModels
    running = None

    @classmethod
    def is_host(cls) -> bool:
        """Whether the program has the version of Forge, such as 2.0.1v1.10.1."""
        return _version().startswith("2.")


class ReforgeSession(ForgeSession):
    """The same in reForge."""

    PROGRAM = REFORGE
    HOST = "reForge"
    RESIDENCE = residence.REFORGE
    PROBES = probes.REFORGE
    TESTED = ("1.0.0v2",)
    _make_memory = ReforgeMemory
    running = None

    @classmethod
    def is_host(cls) -> bool:
        """Whether the program has the version of reForge, such as 1.0.0v2-v1.10.1RC."""
        return _version().startswith("1.")


SESSIONS = (ForgeSession, ClassicSession, OldSession, ReforgeSession)


def start(version: str) -> None:
    """Start the extension; after the WebUI reloaded its scripts, in place of the session before."""
    starting.start(version, SESSIONS)


def _version() -> str:
    return str(_forge_version("version") or "of an unknown version")


def _release() -> str:
    return str(_forge_version("release") or "")


def _forge_version(name: str) -> Any:
    try:
        from modules_forge import forge_version
    except ImportError:
        return None
    return getattr(forge_version, name, None)


def holder_of(model: Any) -> Any:
    """The model that Forge's patches are made for; it has the UNet, and makes predictions of what that gives."""
    return getattr(getattr(getattr(model, "forge_objects", None), "unet", None), "model", None)


def unet_of(model: Any) -> nn.Module | None:
    """The network that makes the steps, of whatever kind it is."""
    unet = getattr(holder_of(model), "diffusion_model", None)
    return unet if isinstance(unet, nn.Module) else None


def _call_is_replaced(holder: nn.Module) -> bool:
    """Whether something else than the class's own method calls the UNet. That method stays on the object after
    what replaced it was taken away."""
    call = vars(holder).get("apply_model")
    own = getattr(type(holder), "apply_model", None)
    return call is not None and (getattr(call, "__func__", None) is not own or call.__self__ is not holder)
