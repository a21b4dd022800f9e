"""The device, and the memory that is in use on it."""

from __future__ import annotations

import torch

cpu = torch.device("cpu")
device = cpu
dtype = torch.float32


def same_device(a: torch.device, b: torch.device) -> bool:
    """Whether two names are of one device."""
    return torch.device(a).type == torch.device(b).type


def torch_gc(force: bool = False, fast: bool = False, reason: str | None = None) -> tuple[float, float]:
    """GiB in use on the GPU, and of RAM, which nobody asks for here."""
    if device.type == "cpu":
        return 0.0, 0.0
    if force:
        torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30, 0.0
