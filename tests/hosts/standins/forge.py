"""A small stand-in of Forge Neo: its module names, its order of events, its patches of weights; ldm's UNet.

Only what the adapter touches is here, and only behaviour that was seen in the WebUI itself.
"""

from __future__ import annotations

import functools
import sys
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from ldm.modules.diffusionmodules.openaimodel import UNetModel
from ldm.modules.diffusionmodules.util import timestep_embedding
from torch import nn

from hosts.standins import a1111, forge_secondary
from hosts.standins.a1111 import (
    CALLBACKS,
    CONTEXT,
    LEVELS,
    Denoiser,
    OptionInfo,
    Options,
    State,
    _module,
    lora_delta,
    scripts_module,
    upscale,
    weights,
)
from sfast_ext.tools.lib import models

TOPS = ("modules", "modules_forge", "backend")
"""The packages of which it has modules."""


class Layer:
    """What Forge gives each layer: its weights may be cast, or patched, in each call."""

    parameters_manual_cast = False
    weight_function: list[Callable[[torch.Tensor], torch.Tensor]] = []
    bias_function: list[Callable[[torch.Tensor], torch.Tensor]] = []

    def cast(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and bias for an input, before they are patched."""
        return self.weight, self.bias  # type: ignore[attr-defined]

    def patched(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and bias of this call."""
        weight, bias = self.cast(x)
        for function in self.weight_function:
            weight = function(weight)
        for function in self.bias_function:
            bias = function(bias)
        return weight, bias


class Linear(nn.Linear, Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, *self.patched(x))


class Conv2d(nn.Conv2d, Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(x, *self.patched(x))


def apply_control(h: torch.Tensor, control: Any, name: str) -> torch.Tensor:
    """Takes a residual out of its list, and adds it."""
    if control is not None and control.get(name):
        h += control[name].pop()
    return h


class IntegratedUNet2DConditionModel(UNetModel):
    """ldm's, with Forge's arguments."""

    def forward(self, x, timesteps=None, context=None, y=None, control=None, transformer_options=None, **kwargs):
        transformer_options["original_shape"] = list(x.shape)
        patches = transformer_options.get("patches", {})
        emb = self.time_embed(timestep_embedding(timesteps, self.model_channels).to(x.dtype))
        if y is not None:
            emb = emb + y
        h, hs = x, []
        for module in self.input_blocks:
            h = apply_control(module(h, emb, context), control, "input")
            for patch in patches.get("input_block_patch", ()):
                h = patch(h, transformer_options)
            hs.append(h)
        h = apply_control(self.middle_block(h, emb, context), control, "middle")
        for module in self.output_blocks:
            h = module(torch.cat([h, apply_control(hs.pop(), control, "output")], dim=1), emb, context)
        return self.out(h)


class Flux(nn.Module):
    """A network of another kind."""

    def forward(self, x, timesteps=None, context=None, y=None, control=None, transformer_options=None, **kwargs):
        return 0.5 * x


@functools.lru_cache(maxsize=None)
def made(
    channels: int, kind: type[nn.Module], linear: type[nn.Linear], conv2d: type[nn.Conv2d], levels: int
) -> nn.Module:
    """A tiny UNet of that class, with these layers; its weights are torch's."""
    with mock.patch.object(nn, "Linear", linear), mock.patch.object(nn, "Conv2d", conv2d):
        return kind(
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


def make_unet(seed: int, channels: int = 32, levels: int | None = None) -> nn.Module:
    """A tiny UNet, none of its weights zero."""
    return models.copied(_made(seed, channels, levels or a1111.by_default))


@functools.lru_cache(maxsize=None)
def _made(seed: int, channels: int, levels: int) -> nn.Module:
    unet = models.copied(made(channels, IntegratedUNet2DConditionModel, Linear, Conv2d, levels))
    unet.load_state_dict(weights(unet, seed))
    return unet.eval().requires_grad_(False)


class KModel(nn.Module):
    """What has the UNet and calls it."""

    model_lowvram, current_weight_patches_uuid = False, None
    storage_dtype = computation_dtype = torch.float32
    loaded = in_part = False

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.diffusion_model = unet

    def all_in_one_place(self) -> None:
        """No layer is apart any more."""
        if self.in_part:
            self.in_part = self.model_lowvram = False

    def apply_model(self, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options=None, **kwargs):
        return self.diffusion_model(
            x, t, context=c_crossattn, control=control, transformer_options=transformer_options, **kwargs
        )


class ModelPatcher:
    """Patches of weights for a model, which clones share: merged when it is loaded, or computed in each call."""

    def __init__(self, model: KModel, load_device: torch.device) -> None:
        self.model, self.load_device, self.offload_device = model, load_device, torch.device("cpu")
        self.patches: dict[str, list[tuple[str, float, bool]]] = {}
        self.backup: dict[str, Any] = {}
        self.patches_uuid = uuid.uuid4()
        self.pinned = 0
        self.force_cast_weights = self.weight_inplace_update = False
        self.weight_wrapper_patches: dict[str, Any] = {}
        self.model.model_loaded_weight_memory = getattr(model, "model_loaded_weight_memory", 0)
        self.model.model_lowvram = getattr(model, "model_lowvram", False)
        self.model_options: dict[str, Any] = {"transformer_options": {}}

    def clone(self) -> ModelPatcher:
        other = type(self)(self.model, self.load_device)
        other.patches = {key: [*found] for key, found in self.patches.items()}
        other.patches_uuid, other.backup = self.patches_uuid, self.backup
        other.model_options = {"transformer_options": dict(self.model_options["transformer_options"])}
        return other

    def add_patches(self, patches: dict[str, str], strength_patch: float = 1.0, *, online_mode: bool = False) -> None:
        names = self.model.state_dict()
        for key in patches.keys() & names.keys():
            self.patches.setdefault(key, []).append((patches[key], strength_patch, online_mode))
        self.patches_uuid = uuid.uuid4()

    def _merged(self, key: str, weight: torch.Tensor) -> torch.Tensor:
        for name, strength, _ in self.patches[key]:
            weight = weight + strength * lora_delta(name, key, weight)
        return weight

    def has_online_lora(self) -> bool:
        return any(online for patches in self.patches.values() for *_, online in patches)

    def loaded_size(self) -> int:
        return self.model.model_loaded_weight_memory

    def patch_weight_to_device(self, key: str, device_to: Any = None) -> None:
        path, _, name = key.rpartition(".")
        layer = self.model.get_submodule(path)
        weight = getattr(layer, name)
        # if the model is in system memory, this is the parameter itself
        self.backup[key] = weight.to(self.offload_device)
        setattr(layer, name, nn.Parameter(self._merged(key, weight.to(device_to)), requires_grad=False))

    def load(self, device_to: Any = None, lowvram_model_memory: float = 0, *, full_load: bool = False) -> None:
        for key, patches in self.patches.items():
            if key in self.backup:
                continue  # the layer stayed when others were unloaded
            if any(online for _, _, online in patches):
                layer = self.model.get_submodule(key.rpartition(".")[0])
                layer.weight_function = [functools.partial(self._merged, key)]
                continue
            ModelPatcher.patch_weight_to_device(self, key, device_to)
        for layer in self.model.modules():
            if isinstance(layer, Layer):
                # a loaded layer has lists of its own
                layer.weight_function, layer.bias_function = [*layer.weight_function], [*layer.bias_function]
                layer.forge_patched_weights = True
        self.model.to(device_to)
        self.model.model_loaded_weight_memory = sum(p.nbytes for p in self.model.parameters())
        self.model.all_in_one_place()
        self.model.loaded = True
        self.model.current_weight_patches_uuid = self.patches_uuid

    def unpin_all_weights(self) -> None:
        self.pinned = 0

    def partially_unload(self, device_to: Any, memory_to_free: float = 0) -> float:
        """Layers go to system memory, the small ones first, without their patches, until so much is freed."""
        freed = 0.0
        layers = [each for each in self.model.named_modules() if isinstance(each[1], Layer)]
        for path, layer in sorted(layers, key=lambda each: sum(p.nbytes for p in each[1].parameters())):
            if freed > memory_to_free:
                break
            if layer.weight.device.type == "cpu":
                continue
            for key in [each for each in self.backup if each.rpartition(".")[0] == path]:
                setattr(layer, key.rpartition(".")[2], nn.Parameter(self.backup.pop(key), requires_grad=False))
            freed += sum(p.nbytes for p in layer.parameters())
            layer.to(device_to)
            self.pinned += 1
        self.model.in_part = self.model.model_lowvram = True
        return freed

    def detach(self) -> None:
        """Without patches, in system memory."""
        for key, weight in self.backup.items():
            path, _, name = key.rpartition(".")
            setattr(self.model.get_submodule(path), name, nn.Parameter(weight, requires_grad=False))
        self.backup.clear()
        for layer in self.model.modules():
            if isinstance(layer, Layer):
                layer.weight_function = []
        self.model.to(self.offload_device)
        self.model.all_in_one_place()
        self.model.loaded, self.model.current_weight_patches_uuid = False, None
        self.model.model_loaded_weight_memory = 0

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> None:
        self.detach()

    def partially_load(self, device_to: Any, extra_memory: float = 0) -> None:
        if self.model.current_weight_patches_uuid not in (None, self.patches_uuid):
            self.detach()
        if not self.model.loaded or self.model.in_part:
            self.load(device_to, full_load=True)


class LoadedModel:
    """A patcher whose model is on the GPU; see `forge_neo_memory` for what it decides."""

    model: Any

    def model_memory(self) -> int:
        return self.model.loaded_size()

    def model_offloaded_memory(self) -> int:
        return 0

    def _moves(self) -> tuple[Any, Any]:
        return self.model.partially_load, self.model.partially_unload


class Host:
    """The WebUI: `load` and `generate` raise the events that the real one raises, in its order."""

    LAYER: type = Layer

    def __init__(self, settings: dict[str, Any], place: torch.device) -> None:
        self.callbacks: dict[str, list[Callable[..., Any]]] = defaultdict(list)
        self.errors: list[BaseException] = []
        self.place = place
        self.opts = Options({**settings})
        self.model_data = SimpleNamespace(sd_model=SimpleNamespace())
        self.loaded: list[ModelPatcher] = []
        self.shared = _module(
            "modules.shared", opts=self.opts, cmd_opts=SimpleNamespace(), OptionInfo=OptionInfo, state=State()
        )
        self.version = _module("modules_forge.forge_version", version="neo", release="2.26")
        self.smart = False
        self.control: Callable[[], Any] = lambda: None
        self.system_memory = 1 << 40
        # what SDXL is told of the image's size, for instance
        self.told: torch.Tensor | None = None

    def modules(self) -> dict[str, ModuleType]:
        """What imports find."""
        registrars = {f"on_{name}": self.callbacks[name].append for name in CALLBACKS}
        memory = {
            "free_memory": self._free,
            "unload_all_models": self._unload_all,
            "get_free_memory": lambda device: self.system_memory,
            "LoadedModel": LoadedModel,
            "load_models_gpu": lambda models, memory_required=0: None,
            "current_loaded_models": [],
        }
        found = {
            "modules": _module("modules", __path__=[str(Path(__file__).parent)]),
            "modules_forge": _module("modules_forge", forge_version=self.version),
            "modules_forge.forge_version": self.version,
            "backend": _module("backend"),
            "backend.memory_management": _module("backend.memory_management", **memory),
            "backend.patcher": _module("backend.patcher"),
            "backend.patcher.base": _module("backend.patcher.base", ModelPatcher=ModelPatcher),
            "backend.patcher.vae": _module("backend.patcher.vae", VAE=forge_secondary.VAE),
            "networks": _module("networks", model_lora_keys_unet=lambda model, key_map=None: list(model.state_dict())),
            **forge_secondary.modules("backend.patcher"),
            "modules.shared": self.shared,
            "modules.sd_models": _module(
                "modules.sd_models", model_data=self.model_data, unload_model_weights=self._unload
            ),
            "modules.call_queue": _module("modules.call_queue", queue_lock=threading.Lock()),
            "modules.processing": _module("modules.processing", process_images_inner=lambda p: None),
            "modules.logging_config": _module("modules.logging_config", TqdmLoggingHandler=None),
            "modules.scripts": scripts_module(),
            "modules.upscaler": _module("modules.upscaler", Upscaler=type("Upscaler", (), {"upscale": upscale})),
            "modules.upscaler_utils": a1111.upscaler_utils(gpu=True),
            **a1111.previews(),
            "modules.script_callbacks": _module("modules.script_callbacks", callback_map=self.callbacks, **registrars),
            "modules.errors": _module("modules.errors", display_once=lambda exc, task: self.errors.append(exc)),
            # settings name its components; nothing shows them here
            "gradio": _module("gradio", Checkbox=object, Slider=object, Radio=object, HTML=object),
        }
        for name, module in found.items():
            package, _, attribute = name.rpartition(".")
            if package:
                setattr(found[package], attribute, module)
        return found

    def fire(self, name: str, *arguments: Any) -> None:
        """The WebUI logs what a callback raises, and goes on."""
        for callback in list(self.callbacks[name]):
            try:
                callback(*arguments)
            except Exception as exc:
                self.errors.append(exc)

    @property
    def unet(self) -> nn.Module:
        return self.model_data.sd_model.forge_objects.unet.model.diffusion_model

    @property
    def memory(self) -> Any:
        return sys.modules["backend.memory_management"]

    def load(self, seed: int, channels: int = 32, unet: nn.Module | None = None) -> None:
        """Another checkpoint: all models leave the GPU, the old one is dropped, then the new one is made."""
        self._drop()
        patcher = self._made(seed, channels, unet)
        self.model_data.sd_model = SimpleNamespace(
            forge_objects=SimpleNamespace(unet=patcher, vae=forge_secondary.vae(seed)),
            original=patcher,
            sd_checkpoint_info=SimpleNamespace(title=f"seed {seed}"),
        )
        self.fire("model_loaded", self.model_data.sd_model)

    def _drop(self) -> None:
        self.model_data.sd_model = None
        self.memory.unload_all_models()

    def _made(self, seed: int, channels: int, unet: nn.Module | None) -> Any:
        return ModelPatcher(KModel(make_unet(seed, channels) if unet is None else unet), self.place)

    def lora(self, online: bool = False, everywhere: bool = False, **multipliers: float) -> None:
        """Activation: clones of the model's patcher, one for each network; the weights stay until it is loaded."""
        objects = self.model_data.sd_model.forge_objects
        objects.unet = self.model_data.sd_model.original
        for name, strength in multipliers.items():
            objects.unet = objects.unet.clone()
            kinds = (n for n, m in self.unet.named_modules() if isinstance(m, self.LAYER))
            layers = (n for n in kinds if everywhere or ".attn" in n)
            keys = [f"diffusion_model.{n}.weight" for n in layers]
            objects.unet.add_patches(dict.fromkeys(keys, name), strength, online_mode=online)

    def option(self, **values: Any) -> None:
        """As a script does before sampling: a clone of the patcher with more in its options."""
        objects = self.model_data.sd_model.forge_objects
        objects.unet = objects.unet.clone()
        objects.unet.model_options["transformer_options"].update(values)

    def _unload(self, *args: Any) -> None:
        self.memory.unload_all_models()
        self.model_data.sd_model = SimpleNamespace()

    def _unload_all(self) -> None:
        while self.loaded:
            self.loaded.pop().detach()

    def _free(self, memory_required: float, device: Any, keep_loaded: Any = ()) -> None:
        """Without smart memory every other model leaves, with it as many of their layers as are in the way."""
        for patcher in [each for each in self.loaded if each not in keep_loaded]:
            if self.smart:
                patcher.partially_unload(patcher.offload_device, memory_required)
                continue
            self.loaded.remove(patcher)
            patcher.detach()

    def _load(self, patcher: Any) -> None:
        """Before a sampler's first step."""
        self.loaded[:] = [each for each in self.loaded if each.model is not patcher.model]
        patcher.partially_load(self.place)
        self.loaded.append(patcher)

    @torch.inference_mode()
    def generate(self, steps: int = 3, size: int = 8) -> torch.Tensor:
        """One pass of a sampler: the model is loaded; per step the callback, then the call of `apply_model`."""
        patcher = self.model_data.sd_model.forge_objects.unet
        self._load(patcher)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn((2, 4, size, size), generator=generator).to(self.place)
        context = torch.randn((2, 7, CONTEXT), generator=generator).to(self.place)
        denoiser = Denoiser()
        denoiser.p, denoiser.step = SimpleNamespace(batch_size=1), 0
        patcher.model_options["transformer_options"]["sampling_sigmas"] = torch.linspace(10, 0, steps + 1)
        for step in range(steps):
            self.fire("cfg_denoiser", SimpleNamespace(denoiser=denoiser, sampling_step=step, sampling_steps=steps))
            sigma = torch.full((1,), 10.0 - step).to(self.place)
            options = {
                **patcher.model_options["transformer_options"],
                "cond_or_uncond": [1, 0],
                "sigmas": sigma,
                "cond_mark": torch.tensor([1.0, 0.0]).to(self.place),
                "cond_indices": [1],
                "uncond_indices": [0],
            }
            control = self.control()
            more: dict[str, Any] = {} if control is None else {"control_model": self}
            if self.told is not None:
                more["y"] = self.told
            timestep = torch.full((2,), 900.0 - 100 * step).to(self.place)
            predicted = patcher.model.apply_model(
                x, timestep, c_crossattn=context, control=control, transformer_options=options, **more
            )
            denoiser.step += 1
            x = x - 0.1 * predicted
        return x


@contextmanager
def running(place: torch.device | None = None, **settings: Any) -> Iterator[Host]:
    """The host in this process: its modules importable; all taken back at the end."""
    host = Host(settings, place or torch.device("cpu"))
    mine = host.modules()
    hidden = {name: m for name, m in sys.modules.items() if name in mine or name.partition(".")[0] in TOPS}
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(mine)
    try:
        yield host
    finally:
        for name in mine:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)
