"""AUTOMATIC1111 WebUI 1.10: where its UNet is, when it changes, and which of its features change the forward."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from sfast_ext.accelerator import accelerator_of
from sfast_ext.config import Config
from sfast_ext.hooks import Hooks
from sfast_ext.hosts import per_request, reasons, starting, system_memory, vae, webui_probes
from sfast_ext.hosts.a1111 import controlnet, lora, memory, probes
from sfast_ext.hosts.a1111.dormant_patches import DormantPatches
from sfast_ext.hosts.a1111.memory import A1111Memory
from sfast_ext.hosts.a1111.whole_unet import WholeUnet
from sfast_ext.hosts.attachment import Attachment, is_host_code, wraps_torchs
from sfast_ext.hosts.host_queue import interrupted
from sfast_ext.hosts.installation import Installation
from sfast_ext.hosts.probes import Examined
from sfast_ext.hosts.text_encoders import TextEncoders
from sfast_ext.hosts.webui_session import WebUISession
from sfast_ext.reasons import Private, Reason
from sfast_ext.report import logger
from sfast_ext.ui import words

LEFTOVER_MARKS = frozenset({"_tome_info", "_deepcache_hooked"})
"""What token merging and DeepCache leave on modules after they are off. While they are on, other signs show it."""
HYPERTILE = "__webui_hypertile_params"
"""Where Hypertile has its parameters on each layer that it may change."""


def detect() -> bool:
    """Whether this process is AUTOMATIC1111's WebUI. Its fork Forge is not: it has another model."""

    def has(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):
            return False

    return has("modules.sd_samplers_cfg_denoiser") and has("modules.sd_hijack_unet") and not has("modules_forge")


class A1111Hooks:
    """What the accelerator of one UNet or ControlNet asks the WebUI at each call. Each answer takes microseconds.

    Args:
        whole: whether a UNet that --lowvram moves comes as a whole; None for what is no UNet of a session.
    """

    def __init__(self, unet: nn.Module, whole: WholeUnet | None = None) -> None:
        from modules import devices, sd_hijack, sd_unet, shared

        self._devices, self._hijack, self._sd_unet, self._shared = devices, sd_hijack, sd_unet, shared
        # Weak: the WebUI may drop the model before its accelerator is released.
        self._unet = weakref.ref(unet)
        self._lora = lora.LoraLayers()
        self._hypertile: list[weakref.ref[nn.Module]] = []
        self._whole = whole
        self._offloaded: Reason | None = None
        self._dormant = DormantPatches()
        self.images: int | None = None
        """How many are made at once; None if the WebUI does not say."""
        self.new_pass()

    def hooks(self) -> Hooks:
        """The hooks as the accelerator takes them."""
        ignored = lora.MARKS | LEFTOVER_MARKS | controlnet.MARKS
        vouch = self.recognised
        return Hooks(
            self.bypass_reason,
            self.prepare,
            self.key,
            vouch,
            words=self.words,
            interrupted=interrupted,
            ignored=ignored,
            system_memory=system_memory.has_room_for,
            short_of_memory=self._short_of_memory,
        )

    def _short_of_memory(self) -> bool:
        return self._whole is not None and self._whole.gave_way(self._unet())

    def words(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        """A call in a user's words."""
        return words.size_words(shapes, self.images)

    def new_pass(self) -> None:
        """Read the whole UNet. Called once for each pass of a sampler; takes a millisecond."""
        unet = self._unet()
        modules = [] if unet is None else list(unet.modules())
        self._lora = lora.LoraLayers(modules, self._on_gpu)
        # its parameters hold their layer; see `LoraLayers`
        self._hypertile = [weakref.ref(m) for m in modules if HYPERTILE in vars(m)]
        self._dormant.new_pass()
        self._offloaded = self._offload_reason()

    def _on_gpu(self, layer: nn.Module) -> contextlib.AbstractContextManager[None]:
        unet = self._unet()
        accelerator = None if unet is None else accelerator_of(unet)
        return contextlib.nullcontext() if accelerator is None else accelerator.on_gpu(layer)

    def _offload_reason(self) -> Reason | None:
        if _moves_blocks(self._shared.sd_model, self._shared.cmd_opts):
            comes_whole = self._whole is not None and self._whole.holds(self._unet())
            return None if comes_whole else reasons.LOWVRAM()
        return None

    def bypass_reason(self) -> Reason | None:
        """Why the call must be bypassed; None if it need not."""
        shared = self._shared
        if self._sd_unet.current_unet is not None:
            option = getattr(self._sd_unet.current_unet, "option", None)
            label = getattr(option, "label", "an SD Unet")
            return reasons.SD_UNET(Private(label))
        if self._offloaded is not None:
            return self._offloaded
        reason = self._weights_reason()
        if reason is not None:
            return reason
        if shared.loaded_hypernetworks:
            names = ", ".join(str(h.name) for h in shared.loaded_hypernetworks)
            return reasons.HYPERNETWORK(Private(names))
        if getattr(shared.sd_model, "applied_token_merged_ratio", 0):
            # tomesd makes new classes for each image, so a plan would last for one image
            return reasons.TOKEN_MERGING()
        return self._hypertile_reason() or self._dormant.active()

    def _weights_reason(self) -> Reason | None:
        """Why the weights of the network cannot be read by a plan."""
        if getattr(self._devices, "fp8", False):
            return reasons.FP8()
        if self._lora.reason is not None:
            return self._lora.reason
        networks = lora.networks()
        if networks is not None and networks.loaded_networks and getattr(self._shared.opts, "lora_functional", False):
            return reasons.LORA_OLD_METHOD()
        return None

    def _hypertile_reason(self) -> Reason | None:
        layers = (layer for each in self._hypertile if (layer := each()) is not None)
        is_on = any(getattr(vars(layer).get(HYPERTILE), "enabled", False) for layer in layers)
        return reasons.HYPERTILE() if is_on else None

    def prepare(self) -> None:
        """Apply the active LoRAs to the weights.

        The WebUI does this in the forward of each layer, which a plan does not call.
        """
        if not getattr(self._shared.opts, "lora_functional", False):
            self._lora.apply()

    def key(self) -> Hashable:
        """What changes the UNet's forward and appears neither in its arguments nor in its modules."""
        attention = (sys.modules.get(name) for name in ("ldm.modules.attention", "sgm.modules.attention"))
        return (
            # replaced by the cross attention optimization, which can change without a callback
            *(getattr(getattr(module, "CrossAttention", None), "forward", None) for module in attention),
            bool(getattr(self._shared.opts, "upcast_attn", False)),
            self._devices.unet_needs_upcast,
            self._devices.dtype_unet,
            self._hijack.model_hijack.circular_enabled,
            # A LoRA may give a bias to a layer that has none, and take it away: prepare() has run before this is asked.
            self._lora.has_bias,
        )

    def recognised(self, module: nn.Module, kind: str, function: object) -> bool:
        """Vouch for what the WebUI itself does to classes and to torch, and for patches that stay in place while they
        are off and then only call the original, such as Hypertile's."""
        if kind in ("class", "function", "replaced") and (is_host_code(function) or wraps_torchs(function)):
            return True
        # A patch that was switched on meanwhile bypasses the call before this is asked.
        params = vars(module).get(HYPERTILE)
        if kind == "forward" and params is not None and getattr(function, "__wrapped__", None) == params.forward:
            return True
        return self._dormant.vouch(function)


class A1111VaeHooks(A1111Hooks):
    """What the accelerator of a VAE's decoder or encoder asks the WebUI at each call.

    Args:
        named: names a call in a user's words.
    """

    def __init__(self, part: nn.Module, named: Callable[[Sequence[tuple[int, ...]]], str | None]) -> None:
        super().__init__(part)
        self._named, self._code = named, sys.modules.get(type(part).__module__)

    def hooks(self) -> Hooks:
        """The hooks as the accelerator takes them. LoRA is of the UNet and of the text encoder alone."""
        return replace(super().hooks(), prepare=None, ignored=LEFTOVER_MARKS | vae.MARKS)

    def words(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        """A call in a user's words."""
        return self._named(shapes)

    def bypass_reason(self) -> Reason | None:
        """Why the call must be bypassed. What is in the UNet's place, or in its layers, does not matter here."""
        return self._hypertile_reason() or self._dormant.active()

    def key(self) -> Hashable:
        """What changes the forward and appears neither in its arguments nor in its modules."""
        return (
            # replaced with the cross attention optimization; in the package of another VAE without a meaning for this
            getattr(getattr(self._code, "AttnBlock", None), "forward", None),
            getattr(self._code, "nonlinearity", None),
            bool(getattr(self._shared.opts, "upcast_attn", False)),
            self._hijack.model_hijack.circular_enabled,
        )


class A1111TextHooks(A1111Hooks):
    """What the accelerator of a text encoder asks the WebUI at each call."""

    def hooks(self) -> Hooks:
        """The hooks as the accelerator takes them."""
        return replace(super().hooks(), ignored=lora.MARKS | LEFTOVER_MARKS)

    def bypass_reason(self) -> Reason | None:
        """Why the call must be bypassed. What is in the UNet's place, or in its layers, does not matter here."""
        return self._weights_reason() or self._dormant.active()

    def key(self) -> Hashable:
        """What changes the forward and appears neither in its arguments nor in its modules."""
        return self._lora.has_bias


class A1111Session(WebUISession):
    """The extension in one run of the WebUI's scripts; see `Session`."""

    HOST = "AUTOMATIC1111 WebUI"
    FOLLOWS_RESIDENCE = True
    PROBES = probes.PROBES
    TESTED = ("v1.10.0", "v1.10.1", "1.10.0", "1.10.1")

    def __init__(self, version: str, found: Examined | None = None) -> None:
        super().__init__(version, found)
        self._unets = Attachment(self._hooks_for, self.report, parts=controlnet.unet_blocks)
        self._controlnets = Attachment(self._hooks_for, self.report, name="controlnet")
        self._vaes = vae.Vaes(self._hooks_for_vae, self.report)
        self._texts = TextEncoders(self._hooks_for_text, self.report)
        small = (self._upscalers.attachment, self._previews.attachment)
        slow = (*self._vaes.attachments, *self._texts.attachments)
        self.attachments = (self._unets, self._controlnets, *slow, *small)
        self._whole = WholeUnet(self.report, lambda: memory.UNET_BLOCKS)
        self._memory = A1111Memory(self._unets, (self._vaes, self._texts), _unet_of, self.report)
        self._host_version = "unknown"

    def has_console(self) -> bool:
        """With --loglevel; without it the WebUI configures no log, and Python then writes warnings only."""
        return logger.hasHandlers()

    @classmethod
    def is_host(cls) -> bool:
        """Whether its modules are there, and those of no fork with another model."""
        return detect()

    def request_script(self) -> type:
        """That of all hosts."""
        return per_request.script()

    def install(self, host: Installation) -> None:
        """As in all such WebUIs, with what frees memory before an upscaler runs."""
        host.feature(webui_probes.VERSION, self._read_version)
        host.add(self._memory.release)
        host.add(self._whole.release)
        super().install(host)
        host.feature(webui_probes.PREVIEW_MEMORY, lambda: self._previews.install_without_gradients(host))
        host.feature(probes.UPSCALERS, lambda: self._memory.install_upscaling(host))

    def _read_version(self) -> None:
        self._host_version = str(self.found["git_tag"]())

    def _install_memory(self) -> None:
        super()._install_memory()
        self._memory.install(self.installation)

    def _follow_vae(self, sd_model: Any) -> None:
        vaes = [getattr(sd_model, "first_stage_model", None)] if self._has_vae else []
        config = self.config()
        followed = self._vaes.follow(vaes, config)
        # read with the hooks that the layers have by now
        followed += self._texts.follow(self._text_encoders_of(sd_model), config)
        for each in followed:
            hooks = self._hooks.get(each.module)
            if hooks is not None:
                hooks.new_pass()
        unet = _unet_of(sd_model)
        self._memory.watch(sd_model, bool(followed) or unet is not None and self._unets.holds(unet))

    def _text_encoders_of(self, sd_model: Any) -> Iterator[Any]:
        if self._has_vae:
            # of SDXL the first is the second, or one of what is in it
            yield from (getattr(sd_model, name, None) for name in ("cond_stage_model", "conditioner"))

    def release_models(self) -> None:
        """Release every network that is accelerated."""
        super().release_models()
        self._texts.release()

    def host_version(self) -> str:
        """The git tag."""
        return self._host_version

    def unet_of(self, model: Any) -> nn.Module | None:
        """The UNet of a model of ldm's or sgm's."""
        return _unet_of(model)

    def prompts_one_by_one(self) -> bool:
        """Unless it pads the shorter one."""
        from modules import shared

        return not any(getattr(shared.opts, name, False) for name in ("pad_cond_uncond", "pad_cond_uncond_v0"))

    def _hooks_for(self, unet: nn.Module) -> Hooks:
        return self._made(unet, lambda: A1111Hooks(unet, self._whole))

    def _hooks_for_vae(self, part: nn.Module, named: Callable[[Sequence[tuple[int, ...]]], str | None]) -> Hooks:
        return self._made(part, lambda: A1111VaeHooks(part, named))

    def _hooks_for_text(self, module: nn.Module) -> Hooks:
        return self._made(module, lambda: A1111TextHooks(module))

    def _made(self, module: nn.Module, make: Callable[[], A1111Hooks]) -> Hooks:
        hooks = self._hooks.get(module)
        if hooks is None:
            hooks = self._hooks[module] = make()
        return hooks.hooks()

    def _step(self, params: Any) -> None:
        self._unets.check_parts()
        super()._step(params)

    def _leave_early(self, model: Any) -> None:
        self.guarded(lambda: self._memory.leave_early(model))

    def _follow(self, sd_model: Any) -> None:
        from modules import sd_unet

        self.report.new_generation()
        # A TensorRT engine or the like has moved the stock UNet to the CPU to free memory: plans are released too.
        unet = None if sd_unet.current_unet is not None else _unet_of(sd_model)
        config = self.config()
        self._follow_whole(sd_model, unet, config)
        accelerator = self._unets.follow(unet, config, keep=list(_resident_unets()))
        self._follow_vae(sd_model)
        networks = [] if unet is None else controlnet.active_networks(unet)
        networks_followed = self._controlnets.follow_all(
            networks, config, keep=[] if unet is None else controlnet.cached_networks(unet)
        )
        for each in (accelerator, *networks_followed):
            self._begin_pass(each)

    def _follow_whole(self, sd_model: Any, unet: nn.Module | None, config: Config) -> None:
        """With --lowvram a UNet in 8 bits comes as a whole."""
        from modules import shared

        wanted = config.enabled and config.eight_bits and _moves_blocks(sd_model, shared.cmd_opts)
        self.guarded(lambda: self._whole.follow(getattr(sd_model, "model", None), unet, shared.device, wanted))


SESSIONS = (A1111Session,)


def _moves_blocks(sd_model: Any, flags: Any) -> bool:
    """Whether --lowvram is on for a model; --medvram sets the model's mark as well."""
    return bool(getattr(sd_model, "lowvram", False) and getattr(flags, "lowvram", False))


def start(version: str) -> None:
    """Start the extension; after the WebUI reloaded its scripts, in place of the session before."""
    starting.start(version, SESSIONS)


def _unet_of(sd_model: Any) -> nn.Module | None:
    unet = getattr(getattr(sd_model, "model", None), "diffusion_model", None)
    return unet if isinstance(unet, nn.Module) else None


def _resident_unets() -> Iterator[nn.Module]:
    """UNets of loaded models that stay on their device while another model is used. They keep their plans."""
    from modules import shared
    from modules.sd_models import model_data

    if getattr(shared.opts, "sd_checkpoints_keep_in_cpu", True) and str(shared.device) != "cpu":
        # The WebUI moves them to the CPU to free GPU memory, so plans must not hold it.
        return
    for model in model_data.loaded_sd_models:
        unet = _unet_of(model)
        if unet is not None:
            yield unet
