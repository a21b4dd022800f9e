"""The GPU that the program computes on, which need not be torch's current one: a WebUI that is started with
`--device-id 1` may leave the first GPU current, and gives each tensor's device by itself."""

from __future__ import annotations

import hashlib
import os

import torch

_chosen: list[int] = []


def use(device: torch.device | None) -> None:
    """From now on this is the program's GPU; with None, a CPU, or "cuda" without a number it is torch's current one."""
    _chosen.clear()
    if device is not None and device.type == "cuda" and device.index is not None:
        _chosen.append(device.index)


def index() -> int:
    """Its number, as torch counts. There must be one."""
    return _chosen[0] if _chosen and _chosen[0] < torch.cuda.device_count() else torch.cuda.current_device()


def device() -> torch.device:
    """It. There must be one."""
    return torch.device("cuda", index())


def card(of: torch.device) -> str:
    """What tells one card from another, also from one of the same name, in all processes; "" for other devices, and if
    the driver does not say."""
    if of.type != "cuda":
        return ""
    try:
        properties = torch.cuda.get_device_properties(of)
    except (RuntimeError, AssertionError):
        return ""
    known = getattr(properties, "uuid", None)  # since torch 2.4
    if known is None:
        known = f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')} {of.index}"
    return f"{properties.name} {hashlib.sha256(str(known).encode()).hexdigest()[:8]}"
