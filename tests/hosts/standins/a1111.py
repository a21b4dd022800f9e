"""A small stand-in of AUTOMATIC1111 1.10: its module names, its order of events, its lazy Lora; the UNet is ldm's own.

Only what the adapter touches is here, and only behaviour that was seen in the WebUI itself.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import image_networks
from hosts.standins.lowvram import BLOCKS, LowVram
from sfast_ext.tools.lib import models

CONTEXT = 32
CALLBACKS = (
    "ui_settings", "ui_tabs", "before_ui", "infotext_pasted", "model_loaded", "cfg_denoiser", "script_unloaded",
    "app_started",
)  # fmt: skip
LAYERS = (nn.Linear, nn.Conv2d, nn.GroupNorm, nn.LayerNorm)
PATCHED = (*LAYERS, nn.MultiheadAttention)


LEVELS: dict[int, dict[str, list[int]]] = {
    1: {"channel_mult": [1], "attention_resolutions": []},
    2: {"channel_mult": [1, 2], "attention_resolutions": [2]},
}
"""Of two levels one has attention and one has none; of one level only the middle block has it."""
by_default = 1


def two_levels(patch: pytest.MonkeyPatch) -> None:
    """Within a test models have two levels: most of their weights are where activations are small, as in a real one."""
    patch.setattr(sys.modules[__name__], "by_default", 2)



def make_unet(seed: int, channels: int = 32, levels: int | None = None) -> nn.Module:
    """ldm's UNet in SD 1.5's shape, tiny, none of its weights zero."""
    return models.copied(_made(seed, channels, levels or by_default))


@functools.lru_cache(maxsize=None)
def _made(seed: int, channels: int, levels: int) -> nn.Module:
    unet = models.copied(_shaped(channels, levels))
    unet.load_state_dict(weights(unet, seed))
    return unet.eval().requires_grad_(False)


@functools.lru_cache(maxsize=None)
def _shaped(channels: int, levels: int) -> nn.Module:
    from ldm.modules.diffusionmodules.openaimodel import UNetModel

    return UNetModel(
        image_size=32,
        in_channels=4,
        out_channels=4,
        model_channels=channels,
        num_res_blocks=1,
        num_heads=4,
        use_spatial_transformer=True,
        transformer_depth=1,
        context_dim=CONTEXT,
        use_checkpoint=False,
        legacy=False,
        **LEVELS[levels],
    )


def weights(unet: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """A state dict for `unet`, as another checkpoint would bring it."""
    return _drawn(seed, tuple((name, value.shape) for name, value in unet.state_dict().items()))


@functools.lru_cache(maxsize=None)
def _drawn(seed: int, shapes: tuple[tuple[str, torch.Size], ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes:
        noise = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            state[name] = noise * shape[1:].numel() ** -0.5
        else:
            state[name] = (1.0 if name.endswith("weight") else 0.0) + 0.1 * noise
    return state


def load_weights(unet: nn.Module, seed: int) -> None:
    """Another checkpoint's values into the same layers, which forget their Lora."""
    unet.load_state_dict(weights(unet, seed))
    for layer in unet.modules():
        if isinstance(layer, LAYERS):
            layer.network_current_names, layer.network_weights_backup = (), None


def name_layers(module: nn.Module, prefix: str = "") -> None:
    """Tell each layer the name by which a Lora knows it."""
    for name, layer in module.named_modules(prefix=prefix):
        layer.network_layer_name = name.replace(".", "_")


def upscale(self: Any, image: torch.Tensor, scale: int) -> torch.Tensor:
    """What the WebUI's upscalers inherit."""
    return image.repeat_interleave(scale, -1).repeat_interleave(scale, -2)


def upscaler_utils(gpu: bool = False) -> ModuleType:
    """What upscales an image in tiles. With `gpu` as in Forge Neo, which calls the model in one more function."""

    def run(model: Any, tile: torch.Tensor) -> torch.Tensor:
        return model(tile)

    @torch.inference_mode()
    def upscale_pil_patch(model: Any, img: torch.Tensor) -> torch.Tensor:
        return (module._model if gpu else run)(model, img)

    @torch.inference_mode()
    def upscale_with_model(model: Any, img: torch.Tensor, *, tile_size: int) -> list[torch.Tensor]:
        columns, rows = range(0, img.shape[-1], tile_size), range(0, img.shape[-2], tile_size)
        tiles = [img[..., y : y + tile_size, x : x + tile_size] for y in rows for x in columns]
        return [module.upscale_pil_patch(model, tile) for tile in tiles]

    module = _module("modules.upscaler_utils", upscale_pil_patch=upscale_pil_patch)
    module.upscale_with_model = upscale_with_model  # type: ignore[attr-defined]
    if gpu:
        module._model = run  # type: ignore[attr-defined]
    return module


def previews() -> dict[str, ModuleType]:
    """TAESD, which is loaded with the first preview, and what decodes one; its result is in gradients' way no more."""
    loaded: dict[str, nn.Module] = {}

    def decoder_model() -> nn.Module:
        if "taesd" not in loaded:
            # its weights take gradients
            loaded["taesd"] = image_networks.preview_decoder(8).requires_grad_(True)
        return loaded["taesd"]

    def samples_to_images_tensor(sample: torch.Tensor, approximation: Any = None, model: Any = None) -> torch.Tensor:
        common.recorded.append(torch.is_grad_enabled())  # type: ignore[attr-defined]
        return taesd.decoder_model()(sample).detach() * 2 - 1  # type: ignore[attr-defined, no-any-return]

    taesd = _module("modules.sd_vae_taesd", decoder_model=decoder_model)
    common = _module("modules.sd_samplers_common", samples_to_images_tensor=samples_to_images_tensor, recorded=[])
    taesd.loaded = loaded  # type: ignore[attr-defined]
    return {"modules.sd_vae_taesd": taesd, "modules.sd_samplers_common": common}


def scripts_module() -> ModuleType:
    """What scripts are made of, and which there are."""
    methods = {name: lambda self, *args: None for name in ("title", "show", "ui", "before_process")}
    return _module("modules.scripts", Script=type("Script", (), methods), AlwaysVisible=object(), scripts_data=[])


class Vae(nn.Module):
    """What is known of ldm's by its attributes: its widths; half the sides of the image, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(3, 4, 4, stride=4), nn.ConvTranspose2d(4, 3, 4, stride=4)
        self.encoder.ch, self.encoder.in_ch_mult = 16, (1, 1, 2, 4)


class TextEncoder(nn.Module):
    """Half as large as the UNet, or larger."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size // 4), requires_grad=False)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        return context + self.weight[0]


class WrappedTextEncoder(nn.Module):
    """The WebUI's own around it, for emphasis and embeddings."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        return self.wrapped(context)


class DiffusionWrapper(nn.Module):
    """What the WebUI calls; it has the UNet."""

    diffusion_model: nn.Module

    def forward(self, x: torch.Tensor, t: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return self.diffusion_model(x, t, context=context)


class OptionInfo:
    """The WebUI's description of one setting."""

    def __init__(self, default=None, label="", component=None, component_args=None, onchange=None, section=None, **_):
        self.default, self.label, self.section, self.comment_after = default, label, section, ""
        self.component, self.component_args, self.onchange = component, component_args, onchange

    def info(self, text: str) -> OptionInfo:
        self.comment_after += text
        return self

    def needs_reload_ui(self) -> OptionInfo:
        return self


class Options:
    """Values by attribute; an option that nobody registered is an AttributeError, unless the settings file holds it."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data, self.data_labels = data, {}

    def add_option(self, key: str, info: OptionInfo) -> None:
        self.data_labels[key] = info
        self.data.setdefault(key, info.default)

    def __getattr__(self, key: str) -> Any:
        data = self.__dict__.get("data", {})
        if key in data:
            return data[key]
        raise AttributeError(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self.data.get(key, default)


class _Shared(ModuleType):
    @property
    def sd_model(self) -> Any:
        return self.model_data.sd_model


class State:
    """What the WebUI is at; its page and its API interrupt it."""

    job, textinfo, interrupted, skipped = "", None, False, False

    def begin(self, job: str = "(unknown)") -> None:
        self.job, self.textinfo, self.interrupted, self.skipped = job, None, False, False

    def end(self) -> None:
        self.job = ""

    def interrupt(self) -> None:
        self.interrupted = True


class Host:
    """The WebUI: `load`, `switch`, `generate` raise the events that the real one raises, in its order."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.callbacks: dict[str, list[Callable[..., Any]]] = defaultdict(list)
        self.errors: list[BaseException] = []
        self.opts = Options(
            {"lora_functional": False, "sd_checkpoints_keep_in_cpu": True, "upcast_attn": False, **settings}
        )
        self.model_data = SimpleNamespace(sd_model=None, loaded_sd_models=[])
        self.shared = _Shared("modules.shared")
        self.shared.__dict__.update(
            opts=self.opts, cmd_opts=SimpleNamespace(), device=torch.device("cpu"), model_data=self.model_data,
            loaded_hypernetworks=[], OptionInfo=OptionInfo, state=State(),
        )  # fmt: skip
        # where models and latents are
        self.place = torch.device("cpu")
        self.devices = _module("modules.devices", fp8=False, unet_needs_upcast=False, dtype_unet=torch.float32)
        self.sd_unet = _module("modules.sd_unet", current_unet=None)
        self.hijack = SimpleNamespace(circular_enabled=False)
        self.networks = _module("networks", loaded_networks=[], network_apply_weights=self._apply_lora, originals={})

    def modules(self) -> dict[str, ModuleType]:
        """What `import modules.…` finds."""
        registrars = {f"on_{name}": self.callbacks[name].append for name in CALLBACKS}
        found = {
            # what is written here is the WebUI's own
            "modules": _module("modules", __path__=[str(Path(__file__).parent)]),
            "modules.shared": self.shared,
            "modules.devices": self.devices,
            "modules.sd_unet": self.sd_unet,
            "modules.sd_hijack": _module("modules.sd_hijack", model_hijack=self.hijack),
            "modules.sd_models": _module(
                "modules.sd_models",
                model_data=self.model_data,
                unload_model_weights=lambda *args: None,
                send_model_to_cpu=lambda model: model.model.to("cpu"),
                send_model_to_trash=lambda model: model.model.to("meta"),
            ),
            "modules.call_queue": _module("modules.call_queue", queue_lock=threading.Lock()),
            "modules.processing": _module("modules.processing", process_images_inner=self._process),
            "modules.logging_config": _module("modules.logging_config", TqdmLoggingHandler=None),
            "modules.scripts": scripts_module(),
            "modules.upscaler": _module("modules.upscaler", Upscaler=type("Upscaler", (), {"upscale": upscale})),
            "modules.upscaler_utils": upscaler_utils(),
            **previews(),
            "modules.script_callbacks": _module("modules.script_callbacks", callback_map=self.callbacks, **registrars),
            "modules.errors": _module("modules.errors", display_once=lambda exc, task: self.errors.append(exc)),
            "modules.launch_utils": _module("modules.launch_utils", git_tag=lambda: "v1.10.1"),
            "modules.sd_samplers_cfg_denoiser": _module("modules.sd_samplers_cfg_denoiser"),
            "modules.sd_hijack_unet": _module("modules.sd_hijack_unet"),
            "networks": self.networks,
            # settings name its components; nothing shows them here
            "gradio": _module("gradio", Checkbox=object, Slider=object, Radio=object, HTML=object),
        }
        for name, module in found.items():
            if name.startswith("modules."):
                setattr(found["modules"], name.partition(".")[2], module)
        return found

    def forget_callbacks(self) -> None:
        """As the WebUI does before it loads its scripts again."""
        for registered in self.callbacks.values():
            registered.clear()

    def fire(self, name: str, *arguments: Any) -> None:
        """The WebUI logs what a callback raises, and goes on."""
        for callback in list(self.callbacks[name]):
            try:
                callback(*arguments)
            except Exception as exc:
                self.errors.append(exc)

    def load(
        self,
        seed: int,
        channels: int = 32,
        limit: int = 1,
        medvram: bool = False,
        blocks: bool = False,
        vae: nn.Module | None = None,
        levels: int | None = None,
        text: nn.Module | None = None,
    ) -> Any:
        """Another configuration: a new model; those over the limit go to the meta device first.

        Args:
            medvram: as with --medvram, or with `blocks` with --lowvram.
            vae: its VAE; one of two layers by default.
            text: its text encoder with `medvram`; one of a single weight by default.
        """
        loaded = self.model_data.loaded_sd_models
        while len(loaded) >= limit:
            sys.modules["modules.sd_models"].send_model_to_trash(loaded.pop())
        model = SimpleNamespace(
            model=DiffusionWrapper(),
            first_stage_model=(vae or Vae()).to(self.place),
            lowvram=False,
            sd_checkpoint_info=SimpleNamespace(title=f"seed {seed}"),
        )
        model.model.diffusion_model = make_unet(seed, channels, levels).to("cpu" if medvram else self.place)
        if medvram:
            unet, vae = model.model.diffusion_model, model.first_stage_model.to("cpu")
            model.lowvram = True
            model.cond_stage_model = text or TextEncoder(sum(p.nbytes for p in unet.parameters()) // 2)
            self.lowvram = LowVram(self.place)
            self.lowvram.set_up(model.model, [model.cond_stage_model], vae, BLOCKS if blocks else None)
            self.shared.cmd_opts.lowvram = blocks
            # once it knows what to move
            model.cond_stage_model = WrappedTextEncoder(model.cond_stage_model)
        if "networks" in sys.modules:
            name_layers(model.model)
        self.reuse(model)
        self.fire("model_loaded", model)
        return model

    def reuse(self, model: Any) -> None:
        """A model that is already loaded: no callback."""
        loaded = self.model_data.loaded_sd_models
        if model in loaded:
            loaded.remove(model)
        loaded.insert(0, model)
        self.model_data.sd_model = model

    def switch(self, seed: int) -> None:
        """The same configuration: other values into the same modules, which forget their Lora."""
        model = self.model_data.sd_model
        unet = model.model.diffusion_model
        sys.modules["modules.sd_models"].send_model_to_cpu(model)
        load_weights(unet, seed)
        model.sd_checkpoint_info = SimpleNamespace(title=f"seed {seed}")
        unet.to(self.place)
        self.fire("model_loaded", model)

    def lora(self, **multipliers: float) -> None:
        """Activation: only says which networks are wanted; layers change in their forward."""
        self.networks.loaded_networks[:] = [
            SimpleNamespace(name=name, te_multiplier=m, unet_multiplier=m, dyn_dim=None)
            for name, m in multipliers.items()
        ]

    @torch.no_grad()
    def generate(
        self, steps: int = 3, size: int = 8, tokens: int = 7, refiner: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """One pass of a sampler: per step the refiner's switch, the callback, the UNet as LatentDiffusion calls it."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn((2, 4, size, size), generator=generator).to(self.place)
        context = torch.randn((2, tokens, CONTEXT), generator=generator).to(self.place)
        denoiser = Denoiser()
        denoiser.p, denoiser.step = SimpleNamespace(batch_size=1), 0
        for step in range(steps):
            if self.shared.state.interrupted:
                break
            if refiner is not None and step == steps // 2:
                refiner()
            # the WebUI sets it after each step, so the first two have 0
            shown = max(0, step - 1)
            self.fire("cfg_denoiser", SimpleNamespace(denoiser=denoiser, sampling_step=shown, sampling_steps=steps))
            wrapper = self.model_data.sd_model.model
            call = wrapper if self.model_data.sd_model.lowvram else wrapper.diffusion_model
            denoiser.step += 1
            x = x - 0.1 * call(x, torch.full((2,), 900 - 100 * step).to(self.place), context=context)
        return x

    def request(self, **options: Any) -> Any:
        """A request of the page or the API: its result has what the answer's `info` is made of."""
        p = SimpleNamespace(extra_generation_params={"Sampler": "Euler"}, options=options)
        with sys.modules["modules.call_queue"].queue_lock:
            self.shared.state.begin("a request")
            try:
                return sys.modules["modules.processing"].process_images_inner(p)
            finally:
                self.shared.state.end()

    def _process(self, p: Any) -> Any:
        image = self.generate(**p.options)
        infotext = ", ".join(f"{name}: {value}" for name, value in p.extra_generation_params.items())
        return SimpleNamespace(
            images=[image], infotexts=[infotext], p=p, extra_generation_params=p.extra_generation_params
        )

    @torch.no_grad()
    def _apply_lora(self, layer: nn.Module) -> None:
        name = getattr(layer, "network_layer_name", None)
        wanted = tuple((n.name, n.te_multiplier, n.unet_multiplier, n.dyn_dim) for n in self.networks.loaded_networks)
        if name is None or getattr(layer, "network_current_names", ()) == wanted:
            return
        if isinstance(layer, nn.MultiheadAttention):
            self._apply_to_attention(layer, name, wanted)
            return
        if getattr(layer, "network_weights_backup", None) is None:
            # on the CPU, wherever the weights are
            layer.network_weights_backup = layer.weight.to("cpu", copy=True)
            layer.network_bias_backup = None if layer.bias is None else layer.bias.to("cpu", copy=True)
        layer.weight.copy_(layer.network_weights_backup)
        if layer.network_bias_backup is None:
            # 1.10.1 adds such a bias and fails to take it away
            layer.bias = None
        for network in self.networks.loaded_networks:
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                layer.weight.add_(network.unet_multiplier * lora_delta(network.name, name, layer.weight))
            if network.name == "biased" and layer.bias is None:
                layer.bias = nn.Parameter(lora_delta(network.name, name, layer.weight).flatten(1).sum(1))
        layer.network_current_names = wanted

    def _apply_to_attention(self, layer: nn.MultiheadAttention, name: str, wanted: Any) -> None:
        """Its layer has a name as well, but its forward, which would apply a Lora to it once more, is not called."""
        if getattr(layer, "network_weights_backup", None) is None:
            layer.network_weights_backup = layer.in_proj_weight.clone(), layer.out_proj.weight.clone()
        for weight, backup in zip((layer.in_proj_weight, layer.out_proj.weight), layer.network_weights_backup):
            weight.copy_(backup)
        for network in self.networks.loaded_networks:
            layer.in_proj_weight += network.te_multiplier * lora_delta(network.name, name, layer.in_proj_weight)
            out = lora_delta(network.name, f"{name}_out_proj", layer.out_proj.weight)
            layer.out_proj.weight += network.te_multiplier * out
        layer.network_current_names = wanted

    def patched_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What the Lora extension puts in place of a layer class's forward."""

        def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.opts.lora_functional:
                self._apply_lora(layer)
            return original(layer, *args, **kwargs)

        return forward


def halved(forward: Callable[..., Any]) -> Callable[..., Any]:
    """What the WebUI puts in place of an attention's forward, when another is chosen."""
    return lambda self, x, context=None, mask=None: 0.5 * forward(self, x, context, mask)


class Denoiser(nn.Module):
    """The sampler's denoiser is a module of its own for each pass."""


def lora_delta(network: str, layer: str, weight: torch.Tensor) -> torch.Tensor:
    """What a Lora adds to a layer's weight."""
    return _delta(sum(map(ord, network + layer)), weight.shape).to(weight.device)


@functools.lru_cache(maxsize=None)
def _delta(seed: int, shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * shape[1:].numel() ** -0.5 * 0.5


@contextmanager
def running(**settings: Any) -> Iterator[Host]:
    """The host in this process: its modules importable, the layer classes patched; all taken back at the end."""
    host = Host(settings)
    mine = host.modules()
    hidden = {name: m for name, m in sys.modules.items() if name in mine or name.startswith("modules.")}
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(mine)
    originals = {kind: kind.forward for kind in PATCHED}
    for kind, original in originals.items():
        kind.forward = host.patched_forward(original)  # type: ignore[method-assign]
    try:
        yield host
    finally:
        for kind, original in originals.items():
            kind.forward = original  # type: ignore[method-assign]
        for name in mine:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


def _module(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name == "modules")
    module.__dict__.update(attributes)
    return module
