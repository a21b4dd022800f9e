"""Balanced offload: modules come to the GPU when they are called, and leave it when another is.

The decisions are the host's. With the CPU as its device nothing moves, in the host as here.
"""

from __future__ import annotations

from typing import Any

import accelerate
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn

from modules import devices, shared
from modules.modeldata import model_data

offload_hook_instance: OffloadHook | None = None
WHOLE = ["Linear", "Conv2d", "Embedding"]


class OffloadHook(ModelHook):
    """One for all modules of a checkpoint."""

    def __init__(self, checkpoint_name: str) -> None:
        opts = shared.opts
        self.checkpoint_name = checkpoint_name
        self.min_watermark = opts.diffusers_offload_min_gpu_memory
        self.max_watermark = opts.diffusers_offload_max_gpu_memory
        self.offload_always = opts.diffusers_offload_always.split()
        self.offload_never = opts.diffusers_offload_never.split()
        self.gpu = int(shared.gpu_memory * self.max_watermark * 2**30)
        self.last_pre: int | None = None
        self.last_cls: str | None = None

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """The others leave, then this module comes."""
        another = self.last_pre != id(module) or type(module).__name__ != self.last_cls
        if another and shared.opts.diffusers_offload_pre:
            for other in _modules(model_data.sd_model):
                never = type(other).__name__ in self.offload_never
                if other is not module and not never and not devices.same_device(other.device, devices.cpu):
                    apply_balanced_offload_to_module(other, op="pre")
            self.last_cls = type(module).__name__
        if not devices.same_device(module.device, devices.device):
            _dispatch(module, self.gpu)
        self.last_pre = id(module)
        return args, kwargs

    def detach_hook(self, module: nn.Module) -> nn.Module:
        return module


def _dispatch(module: Any, gpu: int) -> None:
    max_memory = {0: gpu, "cpu": 1 << 40}
    device_map = getattr(module, "balanced_offload_device_map", None)
    if device_map is None or max_memory != module.balanced_offload_max_memory:
        device_map = accelerate.infer_auto_device_map(
            module, max_memory=max_memory, no_split_module_classes=WHOLE, clean_result=False
        )
        # by name: torch without CUDA takes no number for a device
        device_map = {name: str(devices.device) if where == 0 else where for name, where in device_map.items()}
    try:
        accelerate.dispatch_model(
            module,
            main_device=devices.device,
            device_map=device_map,
            offload_dir=getattr(module, "offload_dir", None),
            skip_keys=getattr(module, "_skip_keys", None),
            force_hooks=True,
        )
    except Exception:
        shared.warnings.append("dispatch")
        remove_hook_from_module(module, recurse=True)
        module.balanced_offload_device_map = None
        module.to(devices.device)
        add_hook_to_module(module, offload_hook_instance, append=True)
    module._hf_hook.execution_device = devices.device
    module.balanced_offload_device_map = device_map
    module.balanced_offload_max_memory = max_memory


def move_module_to_cpu(module: Any, op: str = "unk", force: bool = False) -> None:
    """Where it may go, and more of the GPU is in use than the low watermark allows."""
    hook = offload_hook_instance
    try:
        used, _ = devices.torch_gc(fast=True)
        kind = type(module).__name__
        if force:
            module.to(devices.cpu)
        elif hook is not None and kind in hook.offload_never:
            pass
        elif (hook is not None and kind in hook.offload_always) or (
            used / shared.gpu_memory > shared.opts.diffusers_offload_min_gpu_memory
        ):
            module.to(devices.cpu)
    except Exception as exc:
        shared.warnings.append(f"offload: {exc}")


def apply_balanced_offload_to_module(module: Any, op: str = "apply", force: bool = False) -> None:
    """Accelerate's hooks are taken off, the module moves, and the one hook is put back."""
    device_map = getattr(module, "balanced_offload_device_map", None)
    max_memory = getattr(module, "balanced_offload_max_memory", None)
    module = remove_hook_from_module(module, recurse=True)
    move_module_to_cpu(module, op=op, force=force)
    module = add_hook_to_module(module, offload_hook_instance, append=True)
    module._hf_hook.execution_device = devices.device
    if device_map and max_memory:
        module.balanced_offload_device_map = device_map
        module.balanced_offload_max_memory = max_memory
    module.offload_post = False
    devices.torch_gc(fast=True, force=True, reason="offload")


def apply_balanced_offload(pipe: Any, force: bool = False) -> None:
    """At loading and at each job, in which it goes on only if something changed."""
    global offload_hook_instance
    if shared.opts.diffusers_offload_mode != "balanced" or pipe is None:
        return
    cached, hook, opts = True, offload_hook_instance, shared.opts
    name = pipe.sd_checkpoint_info.name
    marks = opts.diffusers_offload_min_gpu_memory, opts.diffusers_offload_max_gpu_memory
    if force or hook is None or (hook.min_watermark, hook.max_watermark) != marks or hook.checkpoint_name != name:
        cached = False
        offload_hook_instance = OffloadHook(name)
    if cached and opts.diffusers_offload_pre:
        return
    for module in _modules(pipe):
        module.module_name = next(key for key, value in vars(pipe).items() if value is module)
        apply_balanced_offload_to_module(module, op="apply", force=force)
    pipe.has_accelerate = True
    for module in _modules(pipe):
        module.has_accelerate = True


def set_diffuser_offload(pipe: Any) -> None:
    """After a model was loaded: what its mode asks for."""
    if shared.opts.diffusers_offload_mode == "group":
        from diffusers.hooks import apply_group_offloading

        for module in _modules(pipe):
            apply_group_offloading(module, onload_device=devices.device, offload_type="leaf_level")
    apply_balanced_offload(pipe)


def forget_hook() -> None:
    """Have a new one made for the next checkpoint."""
    global offload_hook_instance
    offload_hook_instance = None


def disable_offload(pipe: Any) -> None:
    """Takes all hooks off."""
    if not getattr(pipe, "has_accelerate", False):
        return
    for module in _modules(pipe):
        remove_hook_from_module(module, recurse=True)
    pipe.has_accelerate = False


def _modules(pipe: Any) -> list[Any]:
    """The largest first."""
    found = [value for value in vars(pipe).values() if isinstance(value, nn.Module)]
    return sorted(found, key=lambda module: -sum(p.nbytes for p in module.parameters()))
