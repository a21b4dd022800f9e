"""What UNets of real size launch on cards that need not be there. Their weights, never written, take no memory."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx

from benchmarks.compile_table.compiler import SHARED
from benchmarks.kernels import quantisers, transformers
from sfast_ext.call_signature import flatten_call
from sfast_ext.capture.capture import capture
from sfast_ext.kernels.backend import nvrtc, size_prediction, triton_runtime
from sfast_ext.kernels.eight_bits import (
    add_group_norm8,
    add_layer_norm8,
    cat_group_norm8,
    gated_norm8,
    gelu8,
    group_norm8,
    layer_norm8,
    modulated_norm8,
    quantise_rows,
    quantise_weights,
    swiglu8,
)
from sfast_ext.kernels.pointwise import gated_norm, gated_residual, modulated_norm, norm_rotary, swiglu
from sfast_ext.passes import PassContext, run_passes
from sfast_ext.tools.lib import models
from sfast_ext.tools.lib import transformers as transformer_models
from sfast_ext.weights.arena import WeightArena

# of a card with each capability: RTX 2080 Ti, A100, RTX 3090, RTX 4090, H200, B200, RTX 5090
MULTIPROCESSORS = {75: 68, 80: 108, 86: 82, 89: 128, 90: 132, 100: 148, 120: 170}
_CPU, _GPU = torch.device("cpu"), torch.device("cuda", 0)
_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def collect(cases: Sequence[str], dtype: str) -> dict[str, list[dict[str, Any]]]:
    """By capability, the launches that differ, of cases such as "sd15:512x512"; what `triton_compiler.compiled` takes.

    Only kernels of Triton: those in CUDA C++ are taken to be missing, so that Triton's are launched in their place.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {str(capability): {} for capability in SHARED}
    for case in cases:
        calls = _calls(case, getattr(torch, dtype))
        for capability in SHARED:
            with _card(capability):
                launches = size_prediction.launched(calls, _GPU).values()
            for launch in launches:
                if not isinstance(launch.kernel, nvrtc.Source):
                    told = described(launch)
                    found[str(capability)].setdefault(json.dumps(told, sort_keys=True), told)
        print(f"{case}, {dtype}: captured", file=sys.stderr, flush=True)
    return {capability: list(launches.values()) for capability, launches in found.items()}


def _calls(case: str, dtype: torch.dtype, *, triton: bool = True) -> list[size_prediction.Call]:
    return size_prediction.calls(graph(case, dtype, triton=triton))


def of_eight_bits(dtype: torch.dtype) -> list[size_prediction.Call]:
    """The calls of the kernels that write 8 bits, which plans have on demand, at the shapes of their benchmark."""
    if dtype == torch.float32:
        return []

    def shape(*size: int, kind: torch.dtype = dtype) -> size_prediction.Shape:
        return size_prediction.Shape(size, (*size[1:], 1), kind)

    def image_shape(channels: int, size: int) -> size_prediction.Shape:
        strides = channels * size * size, 1, channels * size, channels
        return size_prediction.Shape((2, channels, size, size), strides, dtype)

    found: list[tuple[Any, tuple[Any, ...]]] = []
    for rows, columns, group in quantisers.ROWS:
        found += [(quantise_rows, (shape(rows, columns), each)) for each in (0, group)]
    for rows, columns in quantisers.NORM_ROWS:
        x, vector = shape(rows, columns), shape(columns)
        found += [(layer_norm8, (x, vector, vector, 1e-5)), (add_layer_norm8, (x, x, vector, vector, 1e-5))]
    for channels, size in quantisers.NORM_IMAGES:
        image, vector, rest = image_shape(channels, size), shape(channels), (32, shape(channels), shape(channels), 1e-5)
        found.append((group_norm8, (image, *rest)))
        found.append((add_group_norm8, (image, vector, image, 1.0, *rest)))
    for below, skip, size in quantisers.JOINED:
        rest = 32, shape(below + skip), shape(below + skip), 1e-5
        found.append((cat_group_norm8, (image_shape(below, size), None, None, image_shape(skip, size), *rest)))
    bank = shape(640, 640, kind=torch.int8), shape(640, kind=torch.float32), shape(640, kind=torch.int64)
    found.append((quantise_weights, ([shape(640, 640)], *([each] for each in bank), [128])))
    return [size_prediction.Call(module.launch, args, {}) for module, args in found]


def of_transformers(dtype: torch.dtype) -> list[size_prediction.Call]:
    """The calls of the kernels for diffusion transformers, at the shapes of their benchmark."""

    def shape(*size: int, stride: tuple[int, ...] = (), kind: torch.dtype = dtype) -> size_prediction.Shape:
        dense = tuple(math.prod(size[i + 1 :]) for i in range(len(size)))
        return size_prediction.Shape(size, stride or dense, kind)

    found: list[tuple[Any, tuple[Any, ...]]] = []
    half = dtype != torch.float32
    for images, tokens, channels in transformers.ROWS:
        x, weight = shape(images, tokens, channels), shape(channels)
        each = shape(images, 1, channels, stride=(4 * channels, 4 * channels, 1))
        rms, layer = (weight, None, 1e-5, each, None, True, True), (None, None, 1e-6, each, each, False, True)
        found += [(modulated_norm, (x, *norm)) for norm in (rms, layer)]
        gates = (x, x, each, weight, 1e-5, True), (x, x, each, None, None, False)
        for gated in gates:
            found.append((gated_residual, gated))
            found += [(gated_norm, (*gated, *norm)) for norm in (rms, layer)]
        if half:
            found += [(modulated_norm8, (x, *norm, group)) for norm in (rms, layer) for group in (0, 256)]
            found += [(gated_norm8, (*gates[0], *rms, group)) for group in (0, 256)]
    for images, tokens, heads, columns, form in transformers.HEADS:
        packed = 3 * heads * columns
        x = shape(images, tokens, heads, columns, stride=(tokens * packed, packed, columns, 1))
        angles = shape(1, tokens, 1, columns, kind=torch.float32)
        if form == "complex":
            angles = shape(1, tokens, 1, columns // 2, 2, kind=torch.float32)
        given = (angles, None if form == "complex" else angles, form)
        norm = (x, shape(columns), 1e-5, *given)
        found += [(norm_rotary, norm), (norm_rotary, (x, None, None, *given))]
    # tokens of text in front of those of an image, and an attention in front of GELU: Flux and Chroma
    text = shape(images, 512, heads, columns, stride=(512 * packed, packed, columns, 1))
    angles = shape(1, 512 + tokens, 1, columns, kind=torch.float32)
    found.append((norm_rotary, (text, *norm[1:3], angles, angles, form, x, shape(columns))))
    for rows, columns in transformers.GATED:
        part = shape(rows, columns, stride=(2 * columns, 1))
        found.append((swiglu, (part, part)))
        found += [(swiglu8, (part, part, group)) for group in (0, 256)] if half else []
    found += [(gelu8, (shape(rows, columns), form, 256)) for rows, columns, form in transformers.GELU8] if half else []
    found += [(gelu8, (shape(4608, 12288), "tanh", 256, shape(4608, 3072)))] if half else []
    return [size_prediction.Call(module.launch, args, {}) for module, args in found]


def graph(case: str, dtype: torch.dtype, *, triton: bool = True) -> fx.Graph:
    """The plan's graph for a case such as "sd15:512x512", with the nodes' values in `meta["val"]`, without memory."""
    from diffusers import UNet2DConditionModel

    name, _, size = case.partition(":")
    width, height = map(int, size.split("x"))
    if transformer_models.is_transformer(name):
        unet = transformer_models.blank_transformer(name, dtype=dtype).eval().requires_grad_(False)
        if name == "z-image":
            tables = unet.rope_embedder
            tables.freqs_cis = tables.precompute_freqs_cis(tables.axes_dims, tables.axes_lens, theta=tables.theta)
        given = transformer_models.transformer_inputs(unet, width, height)
    else:
        torch.set_default_dtype(dtype)
        try:
            with models.without_initialisation(_CPU):
                unet = UNet2DConditionModel(**models.unet_config(name)).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(torch.float32)
        given = models.unet_inputs(unet, width, height)
    call = flatten_call(*given, _CPU)
    # masks, whose content a forward may read
    masks = (i for i, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point())
    call.values = frozenset(masks)
    arena = WeightArena(unet)
    # rotary tables, which a behaviour key would have seen
    arena.is_table = lambda tensor: True
    gm = capture(unet.forward, call, call.tensors(_CPU), arena).graph_module
    with mock.patch.object(torch, "cat", _unwritten_cat(torch.cat)):
        run_passes(gm, PassContext(arena, _CPU, triton=triton))
    return gm.graph


def _unwritten_cat(cat: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Weights that are packed take no memory either."""

    def joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        first = tensors[0]
        if dim or type(first) is not torch.Tensor or first.numel() < 1 << 16:
            return cat(tensors, dim)
        return torch.empty((sum(map(len, tensors)), *first.shape[1:]), dtype=first.dtype)

    return joined


@contextmanager
def _card(capability: int) -> Iterator[None]:
    """Within, every CUDA device passes for one of this capability."""
    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS[capability])
    caches = triton_runtime.capability, triton_runtime.multiprocessors
    with (
        mock.patch.object(torch.cuda, "get_device_capability", lambda *args: divmod(capability, 10)),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *args: properties),
    ):
        try:
            for cache in caches:
                cache.cache_clear()
            yield
        finally:
            for cache in caches:
                cache.cache_clear()


def described(launch: size_prediction.Launch) -> dict[str, Any]:
    """A launch as JSON: where its kernel is, and what that is compiled for."""
    kernel = launch.kernel
    unlooked = set(getattr(kernel, "do_not_specialize", None) or ())  # names, or their places in older versions
    types: dict[str, str] = {}
    constants, divisible = dict(launch.constants), []
    for place, (name, value) in enumerate(zip(kernel.arg_names, launch.args)):
        if isinstance(value, torch.dtype):
            types[name] = _TYPES[value]
            divisible.append(name)
        elif isinstance(value, bool):
            types[name] = "i1"
        elif isinstance(value, int):
            types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if name not in unlooked and place not in unlooked:
                if value == 1:
                    constants[name] = 1
                elif value % 16 == 0:
                    divisible.append(name)
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            raise TypeError(f"{kernel} is launched with {name} = {value!r}, of which no type is known")
    # as this Triton launches it: each tells for itself
    for name in ("PDL", "launch_pdl", "enable_fp_fusion"):
        constants.pop(name, None)
    function = kernel.fn
    return {
        "home": function.__module__,
        "name": function.__name__,
        "types": types,
        "constants": constants,
        "divisible": divisible,
    }
