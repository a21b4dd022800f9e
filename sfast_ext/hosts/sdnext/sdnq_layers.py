"""Which layers of SDNQ the passes know: see `passes/quantised_linear.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

KNOWN: dict[str, Any] = {
    "weights_dtype": "int8",
    "quantized_matmul_dtype": "int8",
    "use_quantized_matmul": True,
    "re_quantize_for_matmul": False,
    "use_hadamard": False,
    "use_codebook": False,
    "is_packed": False,
}
"""What the dequantizer of a known layer has. One without any of these is of another release."""
_WITHOUT = ("svd_up", "svd_down", "zero_point")


def is_of_sdnq(module: nn.Module) -> bool:
    """Whether a layer is SDNQ's, which is the package `sdnq` or, in older releases, SD.Next's `modules.sdnq`."""
    return "sdnq_dequantizer" in module.__dict__ or is_class_of_sdnq(type(module))


def is_class_of_sdnq(kind: type) -> bool:
    return kind.__module__.startswith(("sdnq.", "modules.sdnq."))


def unknown_format(layer: nn.Module) -> str | None:
    """What the passes do not know of a layer, in SDNQ's words; None if they know it."""
    dequantizer = layer.__dict__.get("sdnq_dequantizer")
    if not isinstance(layer, nn.Linear):
        return type(layer).__name__.removeprefix("SDNQ")
    for name, known in KNOWN.items():
        value = getattr(dequantizer, name, None)
        if value is None:
            return "another release"
        if value != known:
            return str(value) if name.endswith("dtype") else f"{name}: {value}"
    for name in _WITHOUT:
        if getattr(layer, name, None) is not None:
            return name
    scale: Any = getattr(layer, "scale", None)
    if layer.weight.dtype != torch.int8 or not isinstance(scale, torch.Tensor):
        return "another release"
    if scale.dtype != torch.float32 or scale.shape != (1, layer.weight.shape[-1]):
        return f"scales {scale.dtype} {list(scale.shape)}"
    return None
