"""SD.Next: where its UNet is, when it changes, and which of its features change the forward."""

from __future__ import annotations

import importlib.util
import logging
import sys
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from sfast_ext.accelerator import Accelerator, accelerator_of
from sfast_ext.behaviour.forward_slot import is_own_forward
from sfast_ext.config import Config
from sfast_ext.hooks import Hooks
from sfast_ext.hosts import gpu_room, per_request, reasons, starting, vae, webui_probes
from sfast_ext.hosts.attachment import Attachment, is_host_code
from sfast_ext.hosts.installation import Installation
from sfast_ext.hosts.probes import Examined
from sfast_ext.hosts.rehearsals import interrupted
from sfast_ext.hosts.sdnext import log, probes, startup_objects
from sfast_ext.hosts.sdnext.ip_adapters import IPAdapterReuse
from sfast_ext.hosts.sdnext.offload import Offload
from sfast_ext.hosts.sdnext.refusals import (
    attention_bypass_reason,
    keeps_weights,
    layers_bypass_reason,
    model_bypass_reason,
    run_bypass_reason,
)
from sfast_ext.hosts.session import Session
from sfast_ext.reasons import Reason
from sfast_ext.ui import settings_table, words

VAE = "AutoencoderKL"
"""The class of the VAEs of Stable Diffusion 1, 2 and XL."""
BOOKKEEPING = frozenset(
    {
        "network_layer_name",
        "network_current_names",
        "network_weights_backup",
        "network_bias_backup",
        "module_name",
        "offload_dir",
        "offload_post",
        "has_accelerate",
        "balanced_offload_device_map",
        "balanced_offload_max_memory",
        # accelerate puts new ones on the UNet at each dispatch, which warn and call the original
        "to",
        "cuda",
        "hf_device_map",
        # ToDo leaves it behind, and a hook that writes to it. While ToDo's processors are there, calls are bypassed
        "_tome_info",
        # of group offload; its hooks themselves are seen
        "sdnext_group_offload_sig",
        "sdnext_group_offload_pin",
        "sdnext_group_offload_pin_limit",
        "sdnext_ondemand",
        "_diffusers_hook",
        # the handle of a hook that runs before the UNet's forward
        "sdnext_layout_hook",
    }
)
"""What LoRA and the offload note on modules. The weights themselves show what changed in them."""


def detect() -> bool:
    """Whether this process is SD.Next."""
    try:
        found = [importlib.util.find_spec(f"modules.{name}") for name in ("modeldata", "sd_offload")]
    except (ImportError, ValueError):
        return False
    return None not in found


class SDNextHooks:
    """What the accelerator of one network asks SD.Next at each call. Takes microseconds; the first call of a pass takes
    milliseconds.

    Args:
        pipeline: gives the pipeline that runs the network.
        new_pass: called with that pipeline at the first call of each of its runs.
        pictures: gives how many are made at once; None where SD.Next does not say.
    """

    def __init__(
        self,
        unet: nn.Module,
        pipeline: Callable[[], Any],
        new_pass: Callable[[Any], None] | None = None,
        pictures: Callable[[], int | None] = lambda: None,
    ) -> None:
        from modules import shared

        self._pipeline, self._tell, self._pictures = pipeline, new_pass, pictures
        # Weak: SD.Next may drop the model before its accelerator is released.
        self._unet = weakref.ref(unet)
        self._state, self._opts = shared.state, shared.opts
        self._pass: int | None = None
        self._reason: Reason | None = None
        self._scaled_processors: list[Any] = []
        self._blocks: list[nn.Module] = []

    def hooks(self) -> Hooks:
        """The hooks as the accelerator takes them."""
        # every forward that is vouched for computes what the module's own does
        vouch = self.recognised
        return Hooks(
            self.bypass_reason,
            key=self.key,
            recognised=vouch,
            transparent=vouch,
            words=lambda shapes: words.size_words(shapes, self._pictures()),
            interrupted=interrupted,
            ignored=BOOKKEEPING,
        )

    def bypass_reason(self) -> Reason | None:
        """Why the call must be bypassed, in words for the user; None where it need not."""
        # Modifiers are applied and removed in each run of the pipeline (base, hires, detailer), after every script
        # callback. SD.Next raises this counter when such a run begins.
        now = self._state.total_jobs
        if now != self._pass:
            self._pass = now
            self._new_pass()
        return self._reason

    def key(self) -> Hashable:
        """The scales of IP-Adapters, which may change at each step, and the factors of FreeU."""
        scales = tuple(tuple(s) if isinstance(s, list) else s for s in (p.scale for p in self._scaled_processors))
        return scales, tuple(getattr(b, name, None) for b in self._blocks for name in ("s1", "s2", "b1", "b2"))

    def recognised(self, module: nn.Module, kind: str, function: object) -> bool:
        """Vouch for what SD.Next itself does to classes and to torch.

        Also for accelerate's hook on a submodule where it only moves arguments (offload sets hundreds), and for the
        module's own forward as a bound method, which accelerate and HyperTile leave behind.
        """
        if kind in ("class", "function", "replaced"):
            return is_host_code(function)
        if kind != "forward":
            return False
        if is_own_forward(function, module):
            return True
        maker = getattr(getattr(function, "func", None), "__module__", "")
        hook, inner = module.__dict__.get("_hf_hook"), module.__dict__.get("_old_forward")
        plain = inner is None or is_own_forward(inner, module)
        return maker == "accelerate.hooks" and hook is not None and plain and keeps_weights(hook)

    def _refusal(self, pipe: Any, network: nn.Module) -> Reason | None:
        return attention_bypass_reason(self._opts) or run_bypass_reason(pipe, network)

    def _new_pass(self) -> None:
        unet = self._unet()
        if unet is None:
            return
        pipe = self._pipeline()
        self._reason = self._refusal(pipe, unet)
        processors = (m.__dict__.get("processor", m._modules.get("processor")) for m in unet.modules())
        self._scaled_processors = [p for p in processors if isinstance(getattr(p, "scale", None), (list, float, int))]
        self._blocks = list(getattr(unet, "up_blocks", None) or ())
        accelerator = accelerator_of(unet)
        if accelerator is not None:
            accelerator.new_generation()
        if self._tell is not None:
            self._tell(pipe)


class SDNextVaeHooks(SDNextHooks):
    """What the accelerator of a VAE's decoder or encoder asks SD.Next at each call."""

    def __init__(self, part: nn.Module, named: Callable[[Sequence[tuple[int, ...]]], str | None]) -> None:
        super().__init__(part, lambda: None)
        self._named = named

    def hooks(self) -> Hooks:
        """The hooks as the accelerator takes them."""
        return replace(super().hooks(), words=self._named)

    def _refusal(self, pipe: Any, network: nn.Module) -> Reason | None:
        # what a pipeline does in its steps does not matter here
        return attention_bypass_reason(self._opts) or layers_bypass_reason(network)


class SDNextSession(Session):
    """The extension in one run of SD.Next's scripts; see `Session`."""

    HOST = "SD.Next"
    PROBES = probes.PROBES
    # as short as Git may make it
    TESTED = ("058a7f0",)

    def __init__(self, version: str, found: Examined | None = None) -> None:
        super().__init__(version, found)
        self._pictures: int | None = None

        def pictures() -> int | None:
            return self._pictures

        self._unets = Attachment(
            lambda unet: SDNextHooks(unet, _pipeline, self._follow_controlnets, pictures).hooks(), self.report
        )
        self._refiner = Attachment(
            lambda unet: SDNextHooks(unet, _refiner, pictures=pictures).hooks(), self.report, name="refiner"
        )
        self._controlnets = Attachment(
            lambda network: SDNextHooks(network, _pipeline, pictures=pictures).hooks(), self.report, name="controlnet"
        )
        self._vaes = vae.Vaes(lambda part, named: SDNextVaeHooks(part, named).hooks(), self.report)
        self.attachments = (self._unets, self._refiner, self._controlnets, *self._vaes.attachments)
        networks = (self._refiner, self._controlnets, self._unets)
        self._offload = Offload(networks, self.report, self._vaes.attachments)
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
        freeze = self.callback(lambda *_: self._freeze_startup_objects())
        host.feature(webui_probes.PAGE, lambda: host.callback("on_app_started", freeze))
        host.feature(probes.LOADING, self._install_loading)
        host.feature(probes.IP_ADAPTERS, lambda: host.wrap("apply", self._ip_adapters.apply))
        self._follows_offload = host.feature(probes.OFFLOAD, lambda: self._offload.install(host))
        host.feature(webui_probes.PASTED, lambda: host.add(self._name_infotexts()))

    def _install_loading(self) -> None:
        self.installation.wrap("reload_model_weights", self._reload)
        self.installation.wrap("unload_model_weights", self._unload)

    def _freeze_startup_objects(self) -> None:
        if self.config().enabled:
            self.installation.add(*startup_objects.freeze(self.report))

    def _name_infotexts(self) -> Callable[[], None]:
        """Tell the host which settings the names in an infotext stand for: it has no such field in `OptionInfo`."""
        mapping = self.found["infotext_to_setting_name_mapping"]
        ours = [(each.infotext, each.key) for each in settings_table.SETTINGS if each.infotext is not None]
        mapping.extend(ours)

        def forget() -> None:
            mapping[:] = [each for each in mapping if each not in ours]

        return forget

    def _before_process(self, p: Any) -> None:
        self._pictures = getattr(p, "batch_size", None)
        self.follow()

    def follow_loaded(self) -> None:
        """As before a job."""
        self.follow()

    def loaded(self) -> Accelerator | None:
        """That of the base model."""
        unet = _unet(_pipeline())
        return None if unet is None else accelerator_of(unet)

    def name_pictures(self, pictures: int | None) -> None:
        """For the words of all networks."""
        self._pictures = pictures

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
            attachment.follow(unet, config)
        self._vaes.follow(self._accelerable_vaes(), config)
        self._offload.watch(getattr(pipe, "vae", None) for pipe in (_pipeline(), _refiner()) if config.enabled)

    def _accelerable_vaes(self) -> list[Any]:
        """Those of the loaded pipelines that nothing is known against; the report says what is."""
        from modules import shared

        found: list[Any] = []
        for pipe in (_pipeline(), _refiner()):
            each = getattr(pipe, "vae", None)
            if type(each).__name__ != VAE or any(each is other for other in found):
                continue
            reason = model_bypass_reason(each, shared.opts)
            if reason is None:
                found.append(each)
            else:
                self.report.once("VAE", reason)
        return found

    def release_models(self) -> None:
        """Release every network, and what is kept of IP-Adapters."""
        super().release_models()
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
            self.guarded(self._vaes.suspend if self._reloading else self._vaes.release)
            self._ip_adapters.clear()
        return original(*args, **kwargs)


def _pipeline() -> Any:
    # shared.sd_model would load a model if none is loaded
    from modules.modeldata import model_data

    return model_data.sd_model


def _refiner() -> Any:
    from modules.modeldata import model_data

    return model_data.sd_refiner


def _unet(pipe: Any) -> nn.Module | None:
    unet = getattr(pipe, "unet", None)
    return unet if isinstance(unet, nn.Module) else None


def _controlnets_of(pipe: Any) -> list[nn.Module]:
    held = getattr(pipe, "controlnet", None)
    nets = getattr(held, "nets", held)
    found = list(nets) if isinstance(nets, (list, tuple, nn.ModuleList)) else [nets]
    return [net for net in found if isinstance(net, nn.Module)]


SESSIONS = (SDNextSession,)


def start(version: str) -> None:
    """Start the extension; after SD.Next reloaded its scripts, in place of the session before."""
    starting.start(version, SESSIONS)
