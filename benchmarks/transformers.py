"""Ways to run a diffusion transformer of full size and random weights, side by side in one process: eager, ours, and
torch.compile of its repeated blocks. For each the first call, the time of a call, its memory; and errors against
float32 with fewer layers.

    python -m benchmarks.transformers --model z-image,lumina2 --size 1024x1024,512x512 --compile
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from sfast_ext import Config, accelerate
from sfast_ext.tools.lib import transformers
from sfast_ext.tools.lib.exact import without_tf32

TOKENS = 77
_DEPTHS = ("num_layers", "n_layers", "num_single_layers")
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


def times(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median milliseconds of a call of each way, in turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            call()
            found[name].append(1000 * first_call(call))
    return {name: sorted(taken)[len(taken) // 2] for name, taken in found.items()}


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


@torch.no_grad()
def errors(name: str, size: tuple[int, int], args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Errors against float32, of a model of `args.layers` layers."""
    kind = transformers.random_transformer(f"tiny-{name.removeprefix('tiny-')}").config
    fewer = {each: args.layers for each in _DEPTHS if each in kind}
    model = transformers.random_transformer(name, dtype=_DTYPES[args.dtype], device=device, **fewer)
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
def measure(name: str, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """A row for each size."""
    began = time.perf_counter()
    model = transformers.random_transformer(name, dtype=_DTYPES[args.dtype], device=device)
    synchronise()
    weights = round(sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20)
    print(f"{name}: {weights} MB of weights, made in {time.perf_counter() - began:.1f} s", flush=True)
    regional = compiled(twin(model)) if args.compile else None
    config = Config(allow_cpu=True, drop_slower=False, graph_memory_mb=0, eight_bits=args.eight_bits)
    accelerator = accelerate(model, config)
    rows = []
    for size in args.sizes:
        given, named = transformers.transformer_inputs(model, *size, tokens=TOKENS)
        functions: dict[str, Any] = {"eager": accelerator.run_original, "ours": model, "compiled": regional}
        ways: dict[str, Callable[[], Any]] = {}
        ways |= {way: functools.partial(run, *given, **named) for way, run in functions.items() if run is not None}
        row: dict[str, Any] = {"model": name, "size": size, "weights_mb": weights}
        row["first_call_s"] = {way: round(first_call(call), 2) for way, call in ways.items()}
        # of a forward that fills a table or reads a mask, the plan is made in the second call
        row["second_call_s"] = {way: round(first_call(call), 2) for way, call in ways.items()}
        row["ms"] = {way: round(ms, 2) for way, ms in times(ways, args.rounds).items()}
        row["times_as_long"] = {way: round(ms / row["ms"]["ours"], 3) for way, ms in row["ms"].items()}
        row["peak_mb"] = {way: peak_mb(call) for way, call in ways.items()}
        status, report = accelerator.status(), accelerator.report.as_dict()
        row["plan"] = {key: value for plan in status["plans"][-1:] for key, value in plan.items() if key in _TOLD}
        row["reasons"], row["last_error"] = list(report["reasons"]), report["last_error"]
        print(json.dumps(row), flush=True)
        rows.append(row)
    accelerator.release()
    return rows


_TOLD = {"state", "error", "no_graph_reason", "fused", "memory_mb", "ms_before", "ms_after"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lumina2,z-image", help="names, separated by commas")
    parser.add_argument("--size", default="1024x1024,512x512")
    parser.add_argument("--dtype", default="bfloat16", choices=_DTYPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2, help="of the model whose errors are measured; 0: none are")
    parser.add_argument("--compile", action="store_true", help="also torch.compile of the repeated blocks")
    parser.add_argument("--eight-bits", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.sizes = [tuple(map(int, size.split("x"))) for size in args.size.split(",")]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: list[Any] = []
    for name in args.model.split(","):
        if args.layers:
            found.append({"model": name, "errors": errors(name, args.sizes[-1], args, device)})
            print(json.dumps(found[-1]), flush=True)
        found += measure(name, args, device)
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
        gc.collect()


if __name__ == "__main__":
    main()
