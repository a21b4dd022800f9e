"""SD.Next: where its UNet is, when it changes, and which of its features change the forward."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from sfast_ext.accelerator import Accelerator, accelerator_of
from sfast_ext.config import Config
from sfast_ext.hosts import gpu_room, per_request, reasons, starting, startup_objects, system_memory, vae, webui_probes
from sfast_ext.hosts.attachment import Attachment
from sfast_ext.hosts.installation import Installation
from sfast_ext.hosts.probes import Examined
from sfast_ext.hosts.sdnext import log, probes
from sfast_ext.hosts.sdnext.hooks import SDNextHooks, SDNextTextHooks, SDNextVaeHooks
from sfast_ext.hosts.sdnext.ip_adapters import IPAdapterReuse
from sfast_ext.hosts.sdnext.offload import Offload
from sfast_ext.hosts.sdnext.refusals import attention_bypass_reason, model_bypass_reason, run_bypass_reason
from sfast_ext.hosts.session import Session
from sfast_ext.hosts.text_encoders import TextEncoders
from sfast_ext.reasons import Reason
from sfast_ext.ui import settings_table

_OFF = Config(enabled=False)
VAE = "AutoencoderKL"
"""The class of the VAEs of Stable Diffusion 1, 2 and XL."""

TEXT_ENCODERS = ("text_encoder", "text_encoder_2")
"""Where a pipeline of Stable Diffusion has them."""
TRANSFORMERS = frozenset(
    {
        "CosmosTransformer3DModel",
        "Lumina2Transformer2DModel",
        "ZImageTransformer2DModel",
        "ChromaTransformer2DModel",
        "FluxTransformer2DModel",
    }
)
"""The classes of the transformers that are accelerated, the first one that of Anima."""


def detect() -> bool:
    """Whether this process is SD.Next."""
    try:
        found = [importlib.util.find_spec(f"modules.{name}") for name in ("modeldata", "sd_offload")]
    except (ImportError, ValueError):
        return False
    return None not in found


class SDNextSession(Session):
    """The extension in one run of SD.Next's scripts; see `Session`."""

    HOST = "SD.Next"
    FOLLOWS_RESIDENCE = True
    PROBES = probes.PROBES
    # as short as Git may make it
    TESTED = ("058a7f0",)

    def __init__(self, version: str, found: Examined | None = None) -> None:
        super().__init__(version, found)
        self._images: int | None = None

        def images() -> int | None:
            return self._images

        self._unets = Attachment(
            lambda unet: SDNextHooks(unet, _pipeline, self._follow_controlnets, images, self._offload.whole).hooks(),
            self.report,
        )
        self._refiner = Attachment(
            lambda unet: SDNextHooks(unet, _refiner, images=images, whole=self._offload.whole).hooks(),
            self.report,
            name="refiner",
        )
        self._controlnets = Attachment(
            lambda network: SDNextHooks(network, _pipeline, images=images).hooks(), self.report, name="controlnet"
        )
        self._vaes = vae.Vaes(lambda part, named: SDNextVaeHooks(part, named).hooks(), self.report)
        self._texts = TextEncoders(lambda module: SDNextTextHooks(module).hooks(), self.report)
        rare = (*self._vaes.attachments, *self._texts.attachments)
        self.attachments = (self._unets, self._refiner, self._controlnets, *rare)
        networks = (self._refiner, self._controlnets, self._unets)
        self._offload = Offload(networks, self.report, rare, (self._unets, self._refiner), _run_refusal)
        self._ip_adapters = IPAdapterReuse(self._unets.holds, self.guarded)
        self._reloading = False
        self._follows_offload = False

    @classmethod
    def is_host(cls) -> bool:
        """Whether its modules are there."""
        return detect()

    def request_script(self) -> type:
        """That of all hosts."""
        return per_request.script()

    def register(self) -> None:
        """Connect to SD.Next's log before anything else is done."""
        host = self.installation
        host.feature(probes.LOG, lambda: host.add(log.join(self.found["log"])))
        super().register()

    def say(self, line: str) -> None:
        """Write a line to SD.Next's log."""
        logging.getLogger("sfast_ext").info("%s", line)

    def install(self, host: Installation) -> None:
        """Register callbacks, and wrap the functions that load, unload and move models, for which there are none."""
        host.callback("on_model_loaded", self.callback(lambda _model: self.follow()))
        host.callback("on_before_process", self.callback(self._before_process))
        freeze = self.callback(lambda *_: startup_objects.freeze_if_on(self))
        host.feature(webui_probes.PAGE, lambda: host.callback("on_app_started", freeze))
        host.feature(probes.LOADING, self._install_loading)
        host.feature(probes.IP_ADAPTERS, lambda: host.wrap("apply", self._ip_adapters.apply))
        self._follows_offload = host.feature(probes.OFFLOAD, lambda: self._offload.install(host))
        if self._follows_offload:
            host.feature(probes.WHOLE, lambda: self._offload.whole.install(host))
        host.feature(webui_probes.PASTED, lambda: host.add(self._name_infotexts()))

    def _install_loading(self) -> None:
        self.installation.wrap("reload_model_weights", self._reload)
        self.installation.wrap("unload_model_weights", self._unload)

    def _name_infotexts(self) -> Callable[[], None]:
        """Tell the host which settings the names in an infotext stand for: it has no such field in `OptionInfo`."""
        mapping = self.found["infotext_to_setting_name_mapping"]
        ours = [(each.infotext, each.key) for each in settings_table.SETTINGS if each.infotext is not None]
        mapping.extend(ours)

        def forget() -> None:
            mapping[:] = [each for each in mapping if each not in ours]

        return forget

    def _before_process(self, p: Any) -> None:
        self._images = getattr(p, "batch_size", None)
        self.follow()

    def follow_loaded(self) -> None:
        """As before a job."""
        self.follow()

    def loaded(self) -> Accelerator | None:
        """That of the base model."""
        unet = _unet(_pipeline())
        return None if unet is None else accelerator_of(unet)

    def name_images(self, images: int | None) -> None:
        """For the words of all networks."""
        self._images = images

    def xyz_grid(self) -> Any:
        """The module that its two scripts share."""
        return sys.modules.get("scripts.xyz.xyz_grid_classes")

    def api_passwords(self) -> Mapping[str, str]:
        """Those that its own API asks for: also of users whom its page leaves out, such as one without a password."""
        from modules import shared

        return dict(getattr(getattr(shared, "api", None), "credentials", None) or {})

    def subpath(self) -> str:
        """That of --subpath or of the settings."""
        from modules import shared

        path = str(getattr(shared.opts, "subpath", None) or "")
        return path if not path or path.startswith("/") else f"/{path}"

    def follow(self) -> None:
        """Find which UNets are loaded and whether they can be accelerated. Called before each job."""
        self.report.new_generation()
        config = self.config()
        for attachment, pipe in ((self._unets, _pipeline()), (self._refiner, _refiner())):
            unet = _unet(pipe)
            reason = self._bypass_reason(pipe, unet, config)
            if reason is not None:
                self.report.bypassed(reason)
                unet = None
            self._offload.whole.follow(_unet(pipe), config if unet is not None else _OFF)
            attachment.follow(unet, config)
        self._vaes.follow(self._accelerable_vaes(), config)
        self._texts.follow(self._accelerable_text_encoders(), config)
        self._offload.watch(getattr(pipe, "vae", None) for pipe in (_pipeline(), _refiner()) if config.enabled)

    def _accelerable_vaes(self) -> list[Any]:
        vaes = (getattr(pipe, "vae", None) for pipe in (_pipeline(), _refiner()))
        return self._unrefused((vae for vae in vaes if type(vae).__name__ == VAE), "VAE")

    def _accelerable_text_encoders(self) -> list[nn.Module]:
        encoders = (getattr(pipe, name, None) for pipe in (_pipeline(), _refiner()) for name in TEXT_ENCODERS)
        return self._unrefused((each for each in encoders if isinstance(each, nn.Module)), "text encoder")

    def _unrefused(self, networks: Iterable[Any], what: str) -> list[Any]:
        """Those of the loaded pipelines, each once, that nothing is known against; the report says what is."""
        from modules import shared

        found: list[Any] = []
        for network in networks:
            if any(network is other for other in found):
                continue
            reason = model_bypass_reason(network, shared.opts)
            if reason is None:
                found.append(network)
            else:
                self.report.once(what, reason)
        return found

    def release_models(self) -> None:
        """Release every network, and what is kept of IP-Adapters."""
        self._offload.whole.release()
        super().release_models()
        self._texts.release()
        self._ip_adapters.clear()

    def host_version(self) -> str:
        """The commit."""
        version = self.found.get("version", {})
        return str(version.get("commit") or version.get("updated") or "unknown")

    def model_name(self) -> str | None:
        """The name of the checkpoint."""
        return getattr(getattr(_pipeline(), "sd_checkpoint_info", None), "name", None)

    def _bypass_reason(self, pipe: Any, unet: nn.Module | None, config: Config) -> Reason | None:
        from modules import shared

        if pipe is None or not config.enabled:
            return None
        if unet is None:
            return reasons.NO_UNET_IN_PIPELINE(type(pipe).__name__)
        if getattr(pipe, "sfast", False):
            return reasons.COMPILED()
        if getattr(sys.modules.get("modules.sd_models_compile"), "deepcache_worker", None) is not None:
            return reasons.DEEPCACHE()
        mode = getattr(shared.opts, "diffusers_offload_mode", "none")
        if mode != "none" and not self._follows_offload:
            return reasons.OFFLOAD_UNKNOWN(mode)
        reason = model_bypass_reason(unet, shared.opts)
        moves = pipe is _refiner() and getattr(shared.opts, "diffusers_move_refiner", False)
        if reason is None and moves and not gpu_room.has_room_to_stay(unet):
            reason = reasons.REFINER_MOVED()
        return reason

    def _follow_controlnets(self, pipe: Any) -> None:
        """Accelerate the ControlNets of a pipeline that has begun a run. They are called before the UNet, so it takes
        effect from the next step on."""
        from modules import shared

        networks = [n for n in _controlnets_of(pipe) if model_bypass_reason(n, shared.opts) is None]
        self.guarded(lambda: self._controlnets.follow_all(networks, self.config()))

    def _reload(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._reloading = True
        try:
            return original(*args, **kwargs)
        finally:
            self._reloading = False
            # nothing may have been loaded, or a model that has no use for the plans that were kept
            self.guarded(self.follow)

    def _unload(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        op = args[0] if args else kwargs.get("op", "model")
        attachment = self._refiner if op == "refiner" else self._unets
        # Before the parameters lose their storage, so that the memory of plans is freed, not left behind. Where another
        # model is loaded at once, and there is room for both, the plans are kept for it.
        self.guarded(attachment.suspend if self._reloading else attachment.release)
        if op != "refiner":
            self.guarded(self._controlnets.release)
            for rare in (self._vaes, self._texts):
                self.guarded(rare.suspend if self._reloading else rare.release)
            self._ip_adapters.clear()
        result = original(*args, **kwargs)
        self.guarded(self._offload.sweep)
        if not self._reloading:
            system_memory.trim()
        return result


def _pipeline() -> Any:
    # shared.sd_model would load a model if none is loaded
    from modules.modeldata import model_data

    return model_data.sd_model


def _refiner() -> Any:
    from modules.modeldata import model_data

    return model_data.sd_refiner


def _unet(pipe: Any) -> nn.Module | None:
    """The network that makes the steps: a UNet, or a transformer of a known class."""
    unet = getattr(pipe, "unet", None)
    if isinstance(unet, nn.Module):
        return unet
    transformer = getattr(pipe, "transformer", None)
    known = any(kind.__name__ in TRANSFORMERS for kind in type(transformer).__mro__)
    return transformer if isinstance(transformer, nn.Module) and known else None


def _run_refusal(network: nn.Module) -> Reason | None:
    """Why calls of a network are bypassed in the run of its pipeline that has begun, wherever its weights are."""
    from modules import shared

    refiner = _refiner()
    pipe = refiner if refiner is not None and _unet(refiner) is network else _pipeline()
    return attention_bypass_reason(shared.opts) or run_bypass_reason(pipe, network)


def _controlnets_of(pipe: Any) -> list[nn.Module]:
    held = getattr(pipe, "controlnet", None)
    nets = getattr(held, "nets", held)
    found = list(nets) if isinstance(nets, (list, tuple, nn.ModuleList)) else [nets]
    return [net for net in found if isinstance(net, nn.Module)]


SESSIONS = (SDNextSession,)


def start(version: str) -> None:
    """Start the extension; after SD.Next reloaded its scripts, in place of the session before."""
    starting.start(version, SESSIONS)
