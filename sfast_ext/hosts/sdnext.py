"""SD.Next: where its UNet is, when it changes, and what its features do to it."""

from __future__ import annotations

import functools
import importlib.util
import logging
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

from sfast_ext import environment
from sfast_ext.accelerator import Accelerator
from sfast_ext.config import Config
from sfast_ext.hooks import Hooks
from sfast_ext.hosts import memory
from sfast_ext.hosts.common import Attachment
from sfast_ext.hosts.sdnext_reasons import COMPILED, keeps_weights, passing_reason, standing_reason
from sfast_ext.report import Report
from sfast_ext.slot import accelerator_of, is_own_forward
from sfast_ext.ui import api, settings

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
        # ToDo leaves it and a hook that writes to it behind; while its processors are there, we stand aside
        "_tome_info",
    }
)
"""What LoRA and the offload note on modules; what they say of the weights, the weights themselves say."""

_session: Session | None = None


def detect() -> bool:
    """Whether this process is SD.Next."""
    try:
        found = [importlib.util.find_spec(f"modules.{name}") for name in ("modeldata", "sd_offload")]
    except (ImportError, ValueError):
        return False
    return None not in found


def start(version: str) -> None:
    """Called by the script that SD.Next loads; a second call, of reloaded scripts, replaces the first."""
    global _session
    if _session is not None:
        _session.release()
    _session = Session(version)
    _session.register()
    logging.getLogger("sfast_ext").info(
        "Stable Fast %s: ready; Settings → Stable Fast, report at /sfast/v1/status", version
    )


class Watch:
    """What the accelerator of one network asks at each call; microseconds, but for the first of a pass.

    Args:
        new_pass: told the pipeline at the first call of each of its runs.
    """

    def __init__(self, unet: nn.Module, new_pass: Callable[[Any], None] | None = None) -> None:
        from modules import shared
        from modules.modeldata import model_data

        self._tell = new_pass
        # Weak: the model may be thrown away while its accelerator is still waiting to be told.
        self._unet = weakref.ref(unet)
        self._state, self._model_data = shared.state, model_data
        self._pass: int | None = None
        self._reason: str | None = None
        self._scaled: list[Any] = []
        self._blocks: list[nn.Module] = []

    def hooks(self) -> Hooks:
        """In the shape that the accelerator takes."""
        return Hooks(stand_aside=self.stand_aside, key=self.key, recognised=self.recognised, ignored=BOOKKEEPING)

    def stand_aside(self) -> str | None:
        """Why SD.Next's own forward has to run, or None."""
        # Modifiers come and go with each run of the pipeline (base, hires, detailer), after every script
        # callback; this counter is the host's own mark that such a run began.
        now = self._state.total_jobs
        if now != self._pass:
            self._pass = now
            self._new_pass()
        return self._reason

    def key(self) -> Hashable:
        """IP-Adapter scales, which may change at each step, and FreeU's factors."""
        scales = tuple(tuple(s) if isinstance(s, list) else s for s in (p.scale for p in self._scaled))
        return scales, tuple(getattr(b, name, None) for b in self._blocks for name in ("s1", "s2", "b1", "b2"))

    def recognised(self, module: nn.Module, kind: str, function: object) -> bool:
        """Vouch for accelerate's hook on a submodule where it only moves arguments; offload sets hundreds.

        And for the module's own forward as a bound method: accelerate and HyperTile leave that when they go.
        """
        if kind != "forward":
            return False
        if is_own_forward(function, module):
            return True
        maker = getattr(getattr(function, "func", None), "__module__", "")
        hook, inner = module.__dict__.get("_hf_hook"), module.__dict__.get("_old_forward")
        plain = inner is None or is_own_forward(inner, module)
        return maker == "accelerate.hooks" and hook is not None and plain and keeps_weights(hook)

    def _new_pass(self) -> None:
        unet = self._unet()
        if unet is None:
            return
        self._reason = passing_reason(self._model_data.sd_model, unet)
        processors = (m.__dict__.get("processor", m._modules.get("processor")) for m in unet.modules())
        self._scaled = [p for p in processors if isinstance(getattr(p, "scale", None), (list, float, int))]
        self._blocks = list(getattr(unet, "up_blocks", None) or ())
        accelerator = accelerator_of(unet)
        if accelerator is not None:
            accelerator.new_generation()
        if self._tell is not None:
            self._tell(self._model_data.sd_model)


class Session:
    """The extension in one run of SD.Next's scripts, from their loading to their unloading."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.report = Report()
        self.attachment = Attachment(lambda unet: Watch(unet, self._follow_beside).hooks(), self.report)
        self._beside = Attachment(lambda network: Watch(network).hooks(), self.report, name="controlnet")
        self._accelerator: Accelerator | None = None
        self._reloading = False
        self._moved: tuple[int, Any] | None = None
        self._wrapped: list[tuple[Any, str, Any, Any]] = []
        self._log_parent: logging.Logger | None = None

    def register(self) -> None:
        """Give SD.Next our callbacks and settings, and watch where it throws the model away."""
        from modules import script_callbacks, sd_models, sd_offload, shared

        self._join_log()
        # At once: the model may be loaded, or a request answered, before the settings page is built.
        settings.register(shared.opts, shared.OptionInfo)
        script_callbacks.on_ui_settings(lambda: settings.register(shared.opts, shared.OptionInfo))
        script_callbacks.on_model_loaded(lambda _model: self._guarded(self.follow))
        script_callbacks.on_before_process(lambda _p: self._guarded(self.follow))
        script_callbacks.on_script_unloaded(self.release)
        script_callbacks.on_app_started(lambda _demo, app: api.register(app, self.status))
        # There is no callback for either of these, and both happen to make memory free.
        self._wrap(sd_models, "reload_model_weights", self._reload)
        self._wrap(sd_models, "unload_model_weights", self._unload)
        self._wrap(sd_offload, "move_module_to_cpu", self._move)

    def follow(self) -> None:
        """Look again at which UNet is loaded and whether it may be accelerated; before each job."""
        from modules import shared

        config = settings.config_from(shared.opts, self.report)
        unet = _unet(_pipeline())
        reason = self._refused(unet, config)
        if reason is not None:
            self.report.fallback(reason)
            unet = None
        self._accelerator = self.attachment.follow(unet, config)

    def release(self) -> None:
        """Give everything back; the scripts are unloaded, and loaded again perhaps."""
        self._give_back()
        for owner, name, original, ours in reversed(self._wrapped):
            # Where another extension wrapped ours in turn, ours stays in the chain and only passes on.
            if getattr(owner, name) is ours:
                setattr(owner, name, original)
        self._wrapped.clear()
        logger = logging.getLogger("sfast_ext")
        if self._log_parent is not None:
            logger.parent, self._log_parent = self._log_parent, None

    def status(self) -> dict[str, Any]:
        """What GET /sfast/v1/status answers."""
        from modules import shared

        info = getattr(_pipeline(), "sd_checkpoint_info", None)
        return {
            "version": self.version,
            "host": {"name": "SD.Next", "version": _host_version()},
            "environment": environment.describe(),
            "enabled": settings.config_from(shared.opts).enabled,
            "model": getattr(info, "name", None),
            "accelerators": [*self.attachment.status(), *self._beside.status()],
            **self.report.as_dict(),
        }

    def _refused(self, unet: nn.Module | None, config: Config) -> str | None:
        from modules import sd_models_compile, shared

        pipe = _pipeline()
        if pipe is None or not config.enabled:
            return None
        if unet is None:
            return f"{type(pipe).__name__} has no UNet: Stable Diffusion 1, 2 and XL are what is accelerated"
        if getattr(pipe, "sfast", False):
            return COMPILED
        if sd_models_compile.deepcache_worker is not None:
            return "DeepCache skips parts of the UNet on some steps"
        reason = standing_reason(unet, shared.opts)
        if reason is None and self._moved == (id(unet), _watermark(shared.opts)):
            reason = (
                "balanced offload moves the UNet off the GPU within a job, and plans would hold its memory; "
                "if there is room, raise the low watermark in Settings → Model Offloading, or choose 'none'"
            )
        return reason

    def _follow_beside(self, pipe: Any) -> None:
        """The ControlNets of a pipeline that has begun a run: called before the UNet, so from the next step on."""
        from modules import shared

        networks = [n for n in _controlnets(pipe) if standing_reason(n, shared.opts) is None]
        self._guarded(lambda: self._beside.follow_all(networks, settings.config_from(shared.opts, self.report)))

    def _give_back(self) -> None:
        self._accelerator = None
        self.attachment.release()
        self._beside.release()

    def _reload(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._reloading = True
        try:
            return original(*args, **kwargs)
        finally:
            self._reloading = False
            # nothing was loaded, or what has no plans to take over
            self._guarded(self.follow)

    def _unload(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if (args[0] if args else kwargs.get("op", "model")) in ("model", "dict"):
            self._moved = None
            # Before the parameters lose their storage, so that ours are given back and not left behind; but where
            # another model comes at once, and there is room for both, the plans wait for it.
            self._guarded(self._leave if self._reloading else self._give_back)
        return original(*args, **kwargs)

    def _leave(self) -> None:
        accelerator = self._accelerator
        if accelerator is None:
            # left already: loading unloads once more
            return
        if not memory.may_be_joined(accelerator.module):
            self._give_back()
            return
        self._accelerator = None
        self.attachment.leave()
        self._beside.release()

    def _move(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unet = self._accelerator is not None and self._accelerator.module is module
        ours = (unet or self._beside.settled(module)) and not self._reloading
        before = _home(module) if ours else "cpu"
        result = original(module, *args, **kwargs)
        if ours and before not in ("cpu", "meta") and _home(module) == "cpu":
            from modules import shared

            # What plans read stays on the GPU; where that is short of memory now, it goes.
            if memory.may_stay(module):
                self.report.count("weights_away")
            elif unet:
                self._moved = (id(module), _watermark(shared.opts))
                self._guarded(self._give_back)
            else:
                self._guarded(self._beside.release)
        return result

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            if not self._wrapped:
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        setattr(owner, name, ours)
        self._wrapped.append((owner, name, original, ours))

    def _join_log(self) -> None:
        from modules.logger import log

        # SD.Next silences the root logger.
        logger = logging.getLogger("sfast_ext")
        self._log_parent, logger.parent = logger.parent, log

    def _guarded(self, action: Callable[[], Any]) -> None:
        # SD.Next prints a traceback for each exception of a callback; ours goes to the report.
        try:
            action()
        except Exception as exc:
            self.report.error("host", exc)


def _pipeline() -> Any:
    # shared.sd_model would load a model where there is none
    from modules.modeldata import model_data

    return model_data.sd_model


def _unet(pipe: Any) -> nn.Module | None:
    unet = getattr(pipe, "unet", None)
    return unet if isinstance(unet, nn.Module) else None


def _controlnets(pipe: Any) -> list[nn.Module]:
    held = getattr(pipe, "controlnet", None)
    nets = getattr(held, "nets", held)
    found = list(nets) if isinstance(nets, (list, tuple, nn.ModuleList)) else [nets]
    return [net for net in found if isinstance(net, nn.Module)]


def _home(module: nn.Module) -> str:
    return next((p.device.type for p in module.parameters()), "cpu")


def _watermark(opts: Any) -> tuple[Any, ...]:
    names = ("diffusers_offload_mode", "diffusers_offload_min_gpu_memory", "diffusers_offload_never")
    return tuple(getattr(opts, name, None) for name in names)


def _host_version() -> str:
    try:
        from installer import version

        return str(version.get("commit") or version.get("updated") or "unknown")
    except Exception:
        return "unknown"
