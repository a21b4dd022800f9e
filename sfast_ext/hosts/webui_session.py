"""What the sessions of AUTOMATIC1111's WebUI and of its forks share: their flags, their scripts and their errors."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from sfast_ext.accelerator import Accelerator, accelerator_of
from sfast_ext.hosts import startup_objects, system_memory, webui_probes
from sfast_ext.hosts.attachment import Attachment
from sfast_ext.hosts.installation import Installation
from sfast_ext.hosts.previews import Previews
from sfast_ext.hosts.probes import Examined
from sfast_ext.hosts.session import Session
from sfast_ext.hosts.upscalers import Upscalers
from sfast_ext.report import logger


class WebUISession(Session):
    """A session in a WebUI with `modules.shared.cmd_opts`, `modules.scripts` and `modules.errors`.

    An adapter sets `_unets`, and defines `unet_of`, `_follow`, `_follow_vae` and `_install_memory`.
    """

    PROBES = webui_probes.WEBUI
    _unets: Attachment

    def __init__(self, version: str, found: Examined | None = None) -> None:
        super().__init__(version, found)
        # what each accelerated network asks at a call
        self._hooks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        self._denoiser: weakref.ref[object] | None = None
        self._images: int | None = None
        self._has_vae = False
        self._upscalers = Upscalers(self.report, self.config, self.guarded)
        self._previews = Previews(self.report, self.config, self.guarded)

    def install(self, host: Installation) -> None:
        """Register callbacks, and wrap the functions that free memory, for which there are none."""
        # a model was loaded; or other weights, or another VAE, into the model that is loaded
        host.callback("on_model_loaded", self.callback(self._model_loaded))
        # before each step: the only callback after every switch of the model, those of refiner and hires fix too
        host.callback("on_cfg_denoiser", self.callback(self._step))
        host.feature(webui_probes.MEMORY, self._install_memory)
        self._has_vae = host.feature(webui_probes.VAE, lambda: host.wrap("process_images_inner", self._before_images))
        host.feature(webui_probes.UPSCALED, lambda: self._upscalers.install(host))
        host.feature(webui_probes.PREVIEWS, lambda: self._previews.install(host))
        # AUTOMATIC1111 loads its model while it makes the page
        self.guarded(lambda: startup_objects.freeze_if_on(self))

    def _install_memory(self) -> None:
        self.installation.wrap("unload_model_weights", self._unload)

    @staticmethod
    def model() -> Any:
        """The model that is used; None if there is none."""
        # shared.sd_model is the same one. It would load a model if none is loaded, or is a stand-in of it until then
        from modules.sd_models import model_data

        # Forge Classic has none while it exchanges the checkpoint
        return getattr(model_data, "sd_model", None)

    def unet_of(self, model: Any) -> nn.Module | None:
        """The UNet of a model."""
        raise NotImplementedError

    def _follow(self, model: Any) -> None:
        raise NotImplementedError

    def _model_loaded(self, model: Any) -> None:
        self._follow(model)
        self._leave_early(model)

    def _leave_early(self, model: Any) -> None:
        """See `Accelerator.leave_early`; for a WebUI that loads its model to the GPU before it is accelerated."""

    def _follow_vae(self, model: Any) -> None:
        raise NotImplementedError

    def _before_images(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """img2img encodes its image before the first step, with the settings of this request."""
        self._previews.image_begins()
        self.guarded(lambda: self._follow_vae(self.model()))
        return original(*args, **kwargs)

    def _step(self, params: Any) -> None:
        denoiser = getattr(params, "denoiser", None)
        seen = self._denoiser() if self._denoiser is not None else None
        # the WebUI's state counts the first two steps as 0; its denoiser counts by itself
        step = getattr(denoiser, "step", None)
        if step is None:
            step = getattr(params, "sampling_step", 0)
        new_pass = denoiser is None or denoiser is not seen or step == 0
        model = self.model()
        unet = self.unet_of(model)
        # Each step compares identities. Settings and the UNet are read once for each pass.
        if not new_pass and self._unets.unchanged(unet):
            return
        known = unet is not None and self._unets.holds(unet)
        self._denoiser = weakref.ref(denoiser) if denoiser is not None else None
        self._images = getattr(getattr(denoiser, "p", None), "batch_size", None)
        self._follow(model)
        if not known:
            self._leave_early(model)

    def _begin_pass(self, accelerator: Accelerator | None) -> None:
        """A pass of the sampler through a network has begun."""
        if accelerator is not None:
            hooks = self._hooks.get(accelerator.module)
            if hooks is not None:
                hooks.images = self._images
                hooks.new_pass()
            accelerator.new_generation()

    def follow_loaded(self) -> None:
        """As before a step of an image."""
        self._follow(self.model())

    def loaded(self) -> Accelerator | None:
        """That of the model that is used, not of others that stay in memory."""
        unet = self.unet_of(self.model())
        return None if unet is None else accelerator_of(unet)

    def name_images(self, images: int | None) -> None:
        """For the words of all networks."""
        self._images = images
        for hooks in list(self._hooks.values()):
            hooks.images = images

    def model_name(self) -> str | None:
        """The title of the checkpoint."""
        return getattr(getattr(self.model(), "sd_checkpoint_info", None), "title", None)

    def has_console(self) -> bool:
        """Whether the WebUI writes what is logged to the console, and whose it is."""
        return False

    def register(self) -> None:
        """Write to the console before anything else is done."""
        self._join_console()
        super().register()

    def _join_console(self) -> None:
        if self.has_console():
            return
        handler, was = _console(logging.Formatter("Stable Fast: %(message)s")), logger.propagate
        logger.addHandler(handler)
        # a handler of the root logger, the WebUI's or a package's, would write each line once more
        logger.propagate = False

        def leave() -> None:
            logger.removeHandler(handler)
            logger.propagate = was

        self.installation.add(leave)

    def show_error(self, exc: Exception) -> None:
        """Show an exception once, which the WebUI would log at every step."""
        from modules import errors

        errors.display_once(exc, "Stable Fast")

    def api_passwords(self) -> Mapping[str, str]:
        """The passwords of --api-auth by user, parsed as the WebUI parses them."""
        from modules import shared

        pairs = [pair.partition(":") for pair in (getattr(shared.cmd_opts, "api_auth", None) or "").split(",") if pair]
        return {user: password for user, _, password in pairs}

    def api_is_on(self) -> bool:
        """Whether --api was given, or --nowebui, which implies it."""
        from modules import shared

        return bool(getattr(shared.cmd_opts, "api", False) or getattr(shared.cmd_opts, "nowebui", False))

    def xyz_grid(self) -> Any:
        """The module of its script."""
        from modules import scripts

        found = (data.module for data in scripts.scripts_data if data.script_class.__module__ == "xyz_grid.py")
        return next(found, None)

    def _unload(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.guarded(self.release_models)
        result = original(*args, **kwargs)
        # the weights that a Forge has freed, too
        system_memory.trim()
        return result


def _console(formatter: logging.Formatter) -> logging.Handler:
    """A handler that writes around the WebUI's progress bars, if the WebUI has them."""
    plain = logging.StreamHandler()
    # the WebUI's hands lines over to it while there is no bar
    plain.setFormatter(formatter)
    try:
        from modules.logging_config import TqdmLoggingHandler
    except ImportError:
        return plain
    if TqdmLoggingHandler is None:
        return plain
    around = TqdmLoggingHandler(plain)
    around.setFormatter(formatter)
    return around
