"""Weights that stay on the GPU after others left it, in as few of the allocator's blocks as they need.

PyTorch's allocator gives tensors of 1 to 10 MB parts of blocks of 20 MB, and a block goes back to the driver as a
whole. After SDXL's UNet left an 8 GB card, blocks with 1.6 GB of text encoders and VAE held 3.1 GB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from sfast_ext.weights.host_copies import move_to_gpu
from sfast_ext.weights.module_walk import modules_of, parameters_in
from sfast_ext.weights.original_layout import is_plain, live_tensor, memory_of, set_data
from sfast_ext.weights.staging import to_system_memory


def defragment(modules: Iterable[nn.Module]) -> None:
    """Move the parameters of modules that are on the GPU to system memory, and back. No plan may read them, as they
    get other memory. Those that share memory with others, or with a buffer, stay where they are."""
    inside = {id(each): each for module in modules for each in modules_of(module)}.values()
    there = [p for p in parameters_in(inside) if p.is_cuda and is_plain(p)]
    buffers = [b for each in inside for b in each._buffers.values() if b is not None and b.is_cuda and is_plain(b)]
    used = Counter(map(memory_of, (*there, *{id(b): b for b in buffers}.values())))
    for device in {p.device for p in there}:
        _move([p for p in there if p.device == device and used[memory_of(p)] == 1], device)


def _move(parameters: list[nn.Parameter], device: torch.device) -> None:
    try:
        with torch.inference_mode(False), torch.no_grad():
            for parameter, copy in zip(parameters, to_system_memory([live_tensor(p) for p in parameters])):
                set_data(parameter, copy)
        torch.cuda.empty_cache()
        move_to_gpu(parameters, device)
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for parameter in parameters:
                if not parameter.is_cuda:
                    set_data(parameter, live_tensor(parameter).to(device))
