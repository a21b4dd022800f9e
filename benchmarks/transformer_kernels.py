"""Kernels for diffusion transformers, and whole blocks, next to PyTorch's operations and torch.compile.

python -m benchmarks.transformer_kernels                 # all, on an NVIDIA GPU
python -m benchmarks.transformer_kernels --seconds 45    # torch.compile's columns only as long as there is time

Each way runs in a CUDA graph, by turns in one process; medians. Blocks are diffusers', at full width with random
weights, at the tokens of an image of 1024x1024 and 256 tokens of text. Errors are relative to float64, or to float32
for blocks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kernels import transformers
from benchmarks.kernels.case import Operands, case
from sfast_ext.call_signature import flatten_call
from sfast_ext.capture.capture import capture
from sfast_ext.passes import PassContext, run_passes
from sfast_ext.plans.register_machine import Interpreter
from sfast_ext.weights.arena import WeightArena

_ROUNDS = 7


def graphed(function: Callable[[], Any], repeat: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `repeat` calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            function()
    return graph


def microseconds(ways: list[torch.cuda.CUDAGraph], repeat: int) -> list[float]:
    """The median of a call of each way, by turns."""
    found: list[list[float]] = [[] for _ in ways]
    for _ in range(_ROUNDS):
        for way, times in zip(ways, found, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            way.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / repeat)
    return [sorted(times)[_ROUNDS // 2] for times in found]


def error(actual: Any, wanted: Any) -> float:
    """The largest relative L2 distance of a tensor, or of several."""
    pairs = zip(*(x if isinstance(x, (tuple, list)) else (x,) for x in (actual, wanted)), strict=True)
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs)


def compared(
    name: str,
    ours: Callable[[], Any],
    eager: Callable[[], Any],
    compiled: Callable[[], Any] | None,
    wanted: Any,
    repeat: int,
) -> None:
    """Print a row: times, ratios and errors."""
    errors = error(ours(), wanted), error(eager(), wanted)
    ways = [graphed(ours, repeat), graphed(eager, repeat)]
    if compiled is not None:
        begun = time.perf_counter()
        compiled()
        seconds = time.perf_counter() - begun
        ways.append(graphed(compiled, repeat))
    times = microseconds(ways, repeat)
    more = ""
    if compiled is not None:
        more = f", torch.compile {times[2]:8.1f} ({times[2] / times[0]:.2f} x, {seconds:.1f} s)"
    print(
        f"{name:46} {times[0]:8.1f} us, eager {times[1]:8.1f} ({times[1] / times[0]:5.2f} x){more}; "
        f"error {errors[0]:.2e}, eager {errors[1]:.2e}",
        flush=True,
    )


# --- blocks ---


def z_image(device: str) -> tuple[nn.Module, list[Tensor]]:
    from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock

    with torch.device(device):
        block = ZImageTransformerBlock(0, 3840, 30, 30, 1e-5, True)
        angle = torch.randn(1, 4352, 64)
        given = [torch.randn(1, 4352, 3840), torch.ones(1, 4352, dtype=torch.bool)]
        return block, [*given, torch.polar(torch.ones_like(angle), angle), torch.randn(1, 256)]


def lumina(device: str) -> tuple[nn.Module, list[Tensor]]:
    from diffusers.models.transformers.transformer_lumina2 import Lumina2TransformerBlock

    with torch.device(device):
        block = Lumina2TransformerBlock(2304, 24, 8, 256, None, 1e-5)
        angle = torch.randn(2, 4352, 48)
        given = [torch.randn(2, 4352, 2304), torch.ones(2, 4352, dtype=torch.bool)]
        return block, [*given, torch.polar(torch.ones_like(angle), angle), torch.randn(2, 1024)]


class _Cosmos(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from diffusers.models.transformers.transformer_cosmos import CosmosTransformerBlock

        self.block = CosmosTransformerBlock(16, 128, 1024, adaln_lora_dim=256)

    def forward(self, x: Tensor, text: Tensor, time: Tensor, emb: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.block(x, text, time, emb, (cos, sin))


def anima(device: str) -> tuple[nn.Module, list[Tensor]]:
    with torch.device(device):
        given = [torch.randn(2, 4096, 2048), torch.randn(2, 512, 1024), torch.randn(2, 2048), torch.randn(2, 6144)]
        angle = torch.randn(4096, 64).repeat(1, 2)
        return _Cosmos(), [*given, angle.cos(), angle.sin()]


class _Flux(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from diffusers.models.transformers.transformer_flux import FluxTransformerBlock

        self.block = FluxTransformerBlock(3072, 24, 128)

    def forward(self, x: Tensor, text: Tensor, emb: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return self.block(x, text, emb, (cos, sin))


def flux(device: str) -> tuple[nn.Module, list[Tensor]]:
    with torch.device(device):
        angle = torch.randn(4608, 64).repeat_interleave(2, -1)
        given = [torch.randn(1, 4096, 3072), torch.randn(1, 512, 3072), torch.randn(1, 3072)]
        return _Flux(), [*given, angle.cos(), angle.sin()]


BLOCKS = {"Z-Image": (z_image, 34), "Lumina 2": (lumina, 30), "Anima": (anima, 28), "Flux": (flux, 19)}
"""A block, and how many a model has."""


def half(inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Activations in half precision; angles, which are of tokens alone, as they are."""
    return [t.to(dtype) if t.dtype == torch.float32 and t.shape[0] < 9 else t for t in inputs]


def rewritten(block: nn.Module, inputs: list[Tensor]) -> tuple[Callable[[], Any], dict[str, int]]:
    """A block's forward after all passes, operation by operation, and how often each pass rewrote."""
    device = inputs[0].device
    arena, call = WeightArena(block), flatten_call(tuple(inputs), {}, device)
    given = call.tensors(device)
    gm = capture(block.forward, call, given, arena).graph_module
    counts = run_passes(gm, PassContext(arena, device, triton=True))
    run = Interpreter(gm)
    return lambda: run(*given), counts


def of_block(name: str, dtype: torch.dtype, compile_it: bool) -> None:
    make, count = BLOCKS[name]
    torch.manual_seed(0)
    block, inputs = make("cuda")
    block.eval().requires_grad_(False)
    for parameter in block.parameters():  # of a size that leaves the residual its own
        parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3)
    block.to(dtype)
    given = half(inputs, dtype)
    wanted = block.float()(*(t.float() if t.dtype == dtype else t for t in given))
    block.to(dtype)
    eager = block(*given)
    del eager
    ours, counts = rewritten(block, given)
    fast = torch.compile(block, dynamic=False) if compile_it else None
    row = f"a block of {name}, of {count}"
    compared(row, ours, lambda: block(*given), None if fast is None else lambda: fast(*given), wanted, 2)
    print("   ", {key: n for key, n in counts.items() if n}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1e9, help="torch.compile is left out after so many")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    args = parser.parse_args()
    begun, dtype = time.perf_counter(), getattr(torch, args.dtype)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.dtype}")
    with torch.no_grad():
        for name in BLOCKS:
            try:
                of_block(name, dtype, time.perf_counter() - begun < args.seconds - 15)
            except Exception as exc:
                print(f"a block of {name}: {type(exc).__name__}: {exc}", file=sys.stderr, flush=True)
        operands = Operands(dtype, "cuda")
        for kernel, cases in transformers.CASES.items():
            for i, one in enumerate(cases(operands, case)):
                function, given, options = one.composition or (None, [], {})
                early = i == 0 and time.perf_counter() - begun < args.seconds - 5 and function is not None
                fast = torch.compile(function, dynamic=False) if early else None
                compiled = None if fast is None else lambda f=fast, a=given, k=options: f(*a, **k)
                compared(f"{kernel}, {one.shape}", one.ours, one.torch, compiled, one.target(), 20)


if __name__ == "__main__":
    main()
