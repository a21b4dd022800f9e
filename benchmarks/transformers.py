"""Ways to run a diffusion transformer of full size and random weights, side by side in one process: eager, ours, and
torch.compile of its repeated blocks. For each the first call, the time of a call, its memory; and errors against
float32 with fewer layers.

    python -m benchmarks.transformers --model z-image,lumina2 --size 1024x1024,512x512 --compile
    python -m benchmarks.transformers --model z-image --size 1024x1024 --exact --eight-bits --as sm_80
    python -m benchmarks.transformers --model z-image --size 1024x1024 --card 16

With `--as` kernels are chosen as for another card, PyTorch's linear layers are `mma_gemm`, and its attention is
FlashAttention 2 or, with a mask, the memory-efficient one, as cuBLAS and cuDNN have Hopper's instructions on an H200
(benchmarks.ampere: `mma_gemm` takes as long as cuBLAS's kernels for Ampere).

With `--card` the GPU passes for a small one (benchmarks.small_cards), on which 8 bits leave the half-precision weights
in system memory. The ways are run one after the other: times and peaks are those of `STEPS` calls after the first two,
of which one is compared with the model.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from benchmarks.small_cards.card import small_card
from benchmarks.small_cards.hosts import held_mb
from sfast_ext import Accelerator, Config, accelerate
from sfast_ext.kernels.attention import attention
from sfast_ext.kernels.linear import mma_choice, mma_gemm, mma_linear
from sfast_ext.passes import eight_bits
from sfast_ext.tools.lib import transformers, ways
from sfast_ext.tools.lib.exact import without_tf32

TOKENS, STEPS = 77, 20
_DEPTHS = ("num_layers", "n_layers", "num_single_layers")
_OF_AMPERE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def first_call(call: Callable[[], Any]) -> float:
    synchronise()
    began = time.perf_counter()
    call()
    synchronise()
    return time.perf_counter() - began


@contextlib.contextmanager
def for_ampere() -> Iterator[None]:
    """Within, products on offer are `mma_gemm`'s, and attentions are not cuDNN's, which has instructions of Hopper."""
    choose, preference = mma_choice.MmaChoice.run, attention._PREFERENCE

    def run(self: Any, device: Any, key: str, torchs: Any, ours: Any, tiles: Any, *rest: Any, **named: Any) -> Any:
        own = functools.partial(ours, tile=tiles[0], half_sums=False) if tiles else torchs
        return choose(self, device, key, own, ours, tiles, *rest, **named)

    mma_choice.MmaChoice.run = run  # type: ignore[method-assign]
    if preference is not None:
        orders = {name: [each for each in some if each in _OF_AMPERE] for name, some in preference[1].items()}
        attention._PREFERENCE = preference[0], {name: some for name, some in orders.items() if name != "cudnn"}
    try:
        with ways.passing_for((8, 0)), sdpa_kernel(_OF_AMPERE):
            yield
    finally:
        mma_choice.MmaChoice.run, attention._PREFERENCE = choose, preference  # type: ignore[method-assign]


@contextlib.contextmanager
def eager_for_ampere() -> Iterator[None]:
    """Within, PyTorch's linear layers are computed by `mma_gemm` if that takes them."""
    linear = F.linear

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.numel() // x.shape[-1] < mma_gemm.MIN_ROWS or mma_gemm.accepts_linear(x, weight, bias) is not None:
            return linear(x, weight, bias)
        F.linear = linear  # the one that `mma_linear` calls
        try:
            return mma_linear.launch(x, weight, bias)
        finally:
            F.linear = product

    F.linear = product
    try:
        yield
    finally:
        F.linear = linear


def times(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median milliseconds of a call of each way, in turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            found[name].append(1000 * first_call(call))
    return {name: sorted(taken)[len(taken) // 2] for name, taken in found.items()}


def kernels(call: Callable[[], Any], most: int) -> list[tuple[str, int, float]]:
    """The kernels that take longest in a call: name, how many, milliseconds in all."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        synchronise()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    return [(row.key[:70], row.count, round(row.self_device_time_total / 1e3, 3)) for row in rows[:most]]


def peak_mb(call: Callable[[], Any]) -> float | None:
    if not torch.cuda.is_available():
        return None
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    call()
    synchronise()
    return torch.cuda.max_memory_allocated() / 2**20


def twin(model: nn.Module) -> nn.Module:
    """Another module on the same weights."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def compiled(model: nn.Module) -> nn.Module:
    """The model with its repeated blocks compiled, as diffusers' `compile_repeated_blocks` does."""
    names = getattr(model, "_repeated_blocks", None) or model._no_split_modules
    for module in model.modules():
        if type(module).__name__ in names:
            module.compile(fullgraph=True, dynamic=False)
    return model


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


def fewer(name: str, layers: int | None) -> dict[str, int]:
    """What makes a model of so many layers; None: of all."""
    kind = transformers.random_transformer(f"tiny-{name.removeprefix('tiny-')}").config
    return {each: layers for each in _DEPTHS if layers is not None and each in kind}


@torch.no_grad()
def errors(name: str, size: tuple[int, int], args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Errors against float32, of a model of `args.layers` layers."""
    model = transformers.random_transformer(name, dtype=_DTYPES[args.dtype], device=device, **fewer(name, args.layers))
    exact = nn.Module.to(copy.deepcopy(model), torch.float32)
    given = transformers.transformer_inputs(model, *size, tokens=TOKENS)
    wide, named = tree_map_only(torch.Tensor, lambda x: x.float() if x.is_floating_point() else x, given)
    with without_tf32():
        target = transformers.result_of(exact(*wide, **named))
    found = {"eager": relative(transformers.result_of(model(*given[0], **given[1])), target)}
    accelerator = accelerate(model, Config(allow_cpu=True, drop_slower=False, graph_memory_mb=0))
    for _ in range(3):
        ours = transformers.result_of(model(*given[0], **given[1]))
    found["ours"] = relative(ours, target)
    found["plans"] = len(accelerator.plans)
    accelerator.release()
    return found


@torch.no_grad()
def measure(name: str, args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each size."""
    began = time.perf_counter()
    model = transformers.random_transformer(name, dtype=_DTYPES[args.dtype], device=device)
    synchronise()
    weights = round(sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20)
    print(f"{name}: {weights} MB of weights, made in {time.perf_counter() - began:.1f} s", flush=True)
    regional = compiled(twin(model)) if args.compile else None
    config = Config(allow_cpu=True, drop_slower=False, graph_memory_mb=0)
    accelerator = accelerate(model, config)

    def eager(*given: Any, **named: Any) -> Any:
        with eager_for_ampere() if args.ampere else contextlib.nullcontext():
            return accelerator.run_original(*given, **named)

    def ours(eight_bits: bool, *given: Any, **named: Any) -> Any:
        accelerator.configure(replace(config, eight_bits=eight_bits))
        return model(*given, **named)

    functions: dict[str, Any] = {"eager": eager, "compiled": regional}
    functions |= {"ours": functools.partial(ours, False)} if args.exact or not args.eight_bits else {}
    functions |= {"ours, 8 bits": functools.partial(ours, True)} if args.eight_bits else {}
    for size in args.sizes:
        width, height = size
        given, named = transformers.transformer_inputs(model, width, height, args.images, tokens=TOKENS)
        calls: dict[str, Callable[[], Any]] = {}
        calls |= {way: functools.partial(run, *given, **named) for way, run in functions.items() if run is not None}
        row: dict[str, Any] = {"model": name, "size": size, "images": args.images, "weights_mb": weights}
        row |= {"as": "sm_80"} if args.ampere else {}
        row["first_call_s"] = {way: round(first_call(call), 2) for way, call in calls.items()}
        # of a forward that fills a table or reads a mask, the plan is made in the second call
        row["second_call_s"] = {way: round(first_call(call), 2) for way, call in calls.items()}
        row["ms"] = {way: round(ms, 2) for way, ms in times(calls, args.rounds).items()}
        row["eager_by"] = {way: round(row["ms"]["eager"] / ms, 3) for way, ms in row["ms"].items()}
        row["peak_mb"] = {way: peak_mb(call) for way, call in calls.items()}
        status, report = accelerator.status(), accelerator.report.as_dict()
        row["plans"] = [{key: value for key, value in plan.items() if key in _TOLD} for plan in status["plans"]]
        for plan in row["plans"]:
            plan["fused"] = {key: count for key, count in plan.get("fused", {}).items() if count}
        row["eight_bits"] = {key: value for key, value in status["eight_bits"].items() if key != "kept"}
        row["reasons"], row["last_error"] = list(report["reasons"]), report["last_error"]
        print(json.dumps(row), flush=True)
        yield row
        for way, call in calls.items() if args.profile and device.type == "cuda" else ():
            print(way, kernels(call, args.profile), flush=True)
    accelerator.release()


@torch.no_grad()
def on_card(name: str, args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """A row for each size, of a small card."""
    model = transformers.random_transformer(name, dtype=_DTYPES[args.dtype], device=device, **fewer(name, args.depth))
    gc.collect()
    torch.cuda.empty_cache()
    half = held_mb(model)
    config = Config(drop_slower=False)
    for width, height in args.sizes:
        row: dict[str, Any] = {"model": name, "size": (width, height), "card": args.card, "weights_mb": half}
        row["ways"] = {}
        given, named = transformers.transformer_inputs(model, width, height, args.images, tokens=args.tokens)
        with small_card(args.card):
            for way, rounds in {"eager": None, "ours": False, "ours, 8 bits": True}.items():
                accelerator = None if rounds is None else accelerate(model, replace(config, eight_bits=rounds))
                row["ways"][way] = steps(functools.partial(model, *given, **named), model)
                print(json.dumps({way: row["ways"][way]}), flush=True)
                if accelerator is not None:
                    row["ways"][way] |= told_of(accelerator)
                    accelerator.release()
                gc.collect()
                torch.cuda.empty_cache()
        row["equal"] = both_forms(model, config, given, named)
        print(json.dumps(row), flush=True)
        yield row


def steps(call: Callable[[], Any], model: nn.Module) -> dict[str, Any]:
    """What a way takes on a small card."""
    found: dict[str, Any] = {"first_calls_s": []}
    try:
        found["first_calls_s"] += [round(first_call(call), 2) for _ in range(2)]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        taken = sorted(1000 * first_call(call) for _ in range(STEPS))
    except torch.cuda.OutOfMemoryError as exc:
        return {**found, "out_of_memory": str(exc)[:200]}
    found |= {"ms": round(taken[STEPS // 2], 2), "slowest_ms": round(taken[-1], 1), "held_mb": held_mb(model)}
    found["allocated_mb"] = round(torch.cuda.max_memory_allocated() / 2**20)
    return {**found, "reserved_mb": round(torch.cuda.max_memory_reserved() / 2**20)}


def told_of(accelerator: Accelerator) -> dict[str, Any]:
    """What is known of the plans of a way."""
    report, told = accelerator.report.as_dict(), accelerator.status()["eight_bits"]
    found = {"graphs": sum(plan.has_graph for plan in accelerator.plans.values()), "layers_in_8_bits": told["layers"]}
    return {**found, **{name: report[name] for name in ("counters", "reasons", "last_error")}, "reason": told["reason"]}


def both_forms(model: nn.Module, config: Config, given: Any, named: Any) -> dict[str, Any]:
    """Whether a call gives the same bits in 8 bits with half-precision weights on the GPU and without. Both take all
    layers, also those that are not faster so."""
    results, layers, matches = [], [], eight_bits.matches
    with (
        mock.patch.object(eight_bits, "matches", lambda graph, few_too: matches(graph, few_too=True)),
        mock.patch.object(eight_bits, "paying", lambda found, fused, device: found),
    ):
        for resident in (False, True):
            accelerator = accelerate(model, replace(config, eight_bits=True, resident=resident))
            results.append([transformers.result_of(model(*given, **named)).clone() for _ in range(4)][-1])
            layers.append(accelerator.status()["eight_bits"]["layers"])
            accelerator.release()
    return {"layers": layers, "bits": torch.equal(*results), "error": relative(*results)}


_TOLD = {"state", "error", "no_graph_reason", "fused", "memory_mb", "ms_before", "ms_after"}


def main(given: list[str] | None = None) -> None:
    """Time models and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lumina2,z-image", help="names, separated by commas")
    parser.add_argument("--size", default="1024x1024,512x512")
    parser.add_argument("--dtype", default="bfloat16", choices=_DTYPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2, help="of the model whose errors are measured; 0: none are")
    parser.add_argument("--compile", action="store_true", help="also torch.compile of the repeated blocks")
    parser.add_argument("--eight-bits", action="store_true", help="8 bits instead of the exact way")
    parser.add_argument("--exact", action="store_true", help="the exact way next to 8 bits")
    parser.add_argument("--images", type=int, default=1)
    parser.add_argument("--as", dest="ampere", choices=["sm_80"], help="with kernels for another card")
    parser.add_argument("--card", type=float, metavar="GIB", help="on a card of so many GiB")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the prompt, with --card (%(default)s)")
    parser.add_argument("--depth", type=int, help="with --card, layers of the model; by default all")
    parser.add_argument("--profile", type=int, default=0, help="so many kernels of each way are named with their times")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(given)
    args.sizes = [tuple(map(int, size.split("x"))) for size in args.size.split(",")]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: list[Any] = []
    for name in args.model.split(","):
        if args.layers and args.card is None:
            found.append({"model": name, "errors": errors(name, args.sizes[-1], args, device)})
            print(json.dumps(found[-1]), flush=True)
        with for_ampere() if args.ampere else contextlib.nullcontext():
            for row in (measure if args.card is None else on_card)(name, args, device):
                found.append(row)
                if args.json is not None:
                    args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
        gc.collect()


if __name__ == "__main__":
    main()
