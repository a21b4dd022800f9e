"""What is told of 8 bits: why a machine cannot compute in them, and which layers of a model do."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from sfast_ext import cache_folder, environment, host_gpu, last_start, reasons
from sfast_ext.kernels.eight_bits import MIN_CAPABILITY
from sfast_ext.reasons import Reason

SDXL_BYTES = 5_135_000_000
"""Of SDXL's UNet in half precision."""
SMALL = 2.0
"""A card is small for a model if its memory is less than so many times that of the model's weights. SDXL's UNet takes
4.8 GiB: cards of 8 GB are small for it, those of 10 GB are not."""
RESIDENT, WORKSPACE = 0.55, 3 << 29
"""What is left of SDXL's weights on the GPU, and bytes that the driver and a forward need next to them."""
NONE: dict[str, Any] = {"layers": 0, "kept": [], "bytes": 0}
_FILE = "eight_bits.json"


def refusal() -> Reason | None:
    """Why nothing is computed in 8 bits on this machine; None if it can be."""
    missing = environment.no_gpu()
    return missing or refusal_of(host_gpu.device())


def refusal_of(device: torch.device) -> Reason | None:
    """Why nothing is computed in 8 bits on a GPU; None if it can be."""
    from sfast_ext.kernels.backend import nvrtc, triton_runtime

    has = triton_runtime.capability(device)
    if has < MIN_CAPABILITY:
        return reasons.OLD_FOR_EIGHT_BITS(*(f"{major}.{minor}" for major, minor in (has, MIN_CAPABILITY)))
    if not nvrtc.supported(device):
        return reasons.NVRTC_FOR_EIGHT_BITS(reasons.Detail(nvrtc.unsupported(device) or "it does not load"))
    return None


def fits(total: int, weights: int = SDXL_BYTES, name: str = "SDXL") -> Reason | None:
    """What is to be told of a card for which 8 bits change what is possible; None if they do not.

    Args:
        total: bytes of its memory.
        weights: bytes of the model's UNet in half precision.
        name: of the model.
    """
    small = RESIDENT * weights + WORKSPACE <= total < SMALL * weights
    return reasons.FITS_CARD(name) if small else None


def summary(accelerators: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The layers of all networks in one.

    Args:
        accelerators: their status.

    Returns:
        "layers" in 8 bits; "kept", the others of their kind with the error that each would have, the worst first;
        "bytes" of GPU memory that the copies in 8 bits take.
    """
    found: dict[str, Any] = {"layers": 0, "kept": [], "bytes": 0}
    told = [each for status in accelerators if isinstance(each := status.get("eight_bits"), Mapping)]
    for each in told:
        found["layers"] += each.get("layers", 0)
        found["bytes"] += each.get("bytes", 0)
        found["kept"] += [[str(name), error] for name, error in each.get("kept", ())]
    found["kept"].sort(key=lambda row: -_size(row[1]))
    return found


def _size(error: Any) -> float:
    """For sorting: what is not finite, or was not measured, comes first."""
    return error if isinstance(error, (int, float)) and math.isfinite(error) else math.inf


def lines(found: Mapping[str, Any], most: int | None = None) -> list[str]:
    """A summary for a person, in ASCII.

    Args:
        most: so many of the layers that stay in half precision are named; None: all.
    """
    kept = found["kept"]
    if not found["layers"] and not kept:
        return []
    said = [f"{_layers(found['layers'])} computed in 8 bits, with {found['bytes'] / 2**20:.0f} MB of GPU memory"]
    if kept:
        said.append(f"{_layers(len(kept))} kept in half precision, as 8 bits would change {_it(kept)} too much:")
        listed = kept if most is None else kept[:most]
        said += [f"  {name} ({percent(error)})" for name, error in listed]
        if len(listed) < len(kept):
            said.append(f"  and {len(kept) - len(listed)} more")
    return said


def _layers(count: int) -> str:
    return f"{count} layer is" if count == 1 else f"{count} layers are"


def _it(kept: list[Any]) -> str:
    return "it" if len(kept) == 1 else "them"


def percent(error: Any) -> str:
    """A relative error in words."""
    return f"by {100 * error:.2g} %" if _size(error) < math.inf else "by an unknown amount"


def keep(found: Mapping[str, Any]) -> None:
    """Keep a summary for `doctor`, which runs without the model.

    Raises:
        OSError, RuntimeError: it cannot be kept.
    """
    kept_in = last_start.FOLDER()
    cache_folder.write(kept_in / _FILE, kept_in, json.dumps(found).encode())


def read() -> dict[str, Any] | None:
    """What was kept last; None if nothing was, or the file may be written by others."""
    try:
        kept_in = last_start.FOLDER()
        found = json.loads(cache_folder.read(kept_in / _FILE, kept_in))
    except (OSError, RuntimeError, ValueError):
        return None
    return found if isinstance(found, dict) and NONE.keys() <= found.keys() else None
