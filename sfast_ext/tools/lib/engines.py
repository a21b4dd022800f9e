"""The ways to run one UNet call that the benchmark compares. Each takes its own model and returns a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sfast_ext import Config, accelerate
from sfast_ext.timing import Timer, timer
from sfast_ext.tools.lib import attentions, machine
from sfast_ext.tools.lib.transformers import result_of

Call = Callable[[], torch.Tensor]

SHARES_EAGER = frozenset({"eager", "cudagraph"})
"""These leave the weights where they are, so they may use one model together."""


class Engine:
    """One way to run a call.

    `start` makes it ready for these arguments; the first `call()` may cost more than the others. `stop` gives back
    what it took.
    """

    channels_last = False

    def __init__(self, unet: nn.Module) -> None:
        self.unet = unet.to(memory_format=torch.channels_last) if self.channels_last else unet
        self.device = next(unet.parameters()).device

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sample, *others = args
        if self.channels_last and isinstance(sample, torch.Tensor) and sample.dim() == 4:
            sample = sample.contiguous(memory_format=torch.channels_last)
        self.args, self.kwargs = (sample, *others), kwargs

    def call(self) -> torch.Tensor:
        return result_of(self.unet(*self.args, **self.kwargs))

    def stop(self) -> None:
        pass

    def remark(self) -> str | None:
        """What the reader of its row should know, or None."""
        return None


class Eager(Engine):
    """The model as it is: what a stock WebUI does."""


class EagerChannelsLast(Engine):
    """The model with weights and latent in channels_last."""

    channels_last = True


class CudaGraph(Engine):
    """The model as it is, in a CUDA graph."""

    _graph: torch.cuda.CUDAGraph | None = None

    def _function(self) -> torch.Tensor:
        return result_of(self.unet(*self.args, **self.kwargs))

    def call(self) -> torch.Tensor:
        if self._graph is None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._function()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._output = self._function()
            self._graph = graph
        self._graph.replay()
        return self._output

    def stop(self) -> None:
        # not reset(): in torch 2.1 the destructor then frees the graph once more
        self._graph = None
        self._output = torch.empty(0)


class TorchCompile(CudaGraph):
    """torch.compile in its default mode, channels_last, in a CUDA graph if there is a GPU."""

    channels_last = True

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().start(args, kwargs)
        torch._dynamo.reset()
        # attentions that ask for it are compiled for the memory that is free now
        torch.compiler.assume_constant_result(attentions.free_memory)
        self._compiled = torch.compile(self.unet, fullgraph=True, dynamic=False)

    def _function(self) -> torch.Tensor:
        return result_of(self._compiled(*self.args, **self.kwargs))

    def call(self) -> torch.Tensor:
        return super().call() if self.device.type == "cuda" else self._function()

    def stop(self) -> None:
        super().stop()
        torch._dynamo.reset()


class TorchCompileBlocks(Engine):
    """torch.compile of a transformer's repeated blocks, as diffusers' `compile_repeated_blocks` does."""

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().start(args, kwargs)
        torch._dynamo.reset()
        names = getattr(self.unet, "_repeated_blocks", None) or getattr(self.unet, "_no_split_modules", None) or ()
        for module in self.unet.modules():
            if type(module).__name__ in names:
                module.compile(fullgraph=True, dynamic=False)

    def stop(self) -> None:
        for module in self.unet.modules():
            module._compiled_call_impl = None
        torch._dynamo.reset()


class StableFast(Engine):
    """This extension's accelerator; without Triton's kernels, or with what changes details, if that is asked for."""

    def __init__(
        self, unet: nn.Module, *, triton: bool = True, faster_sums: bool = False, eight_bits: bool = False
    ) -> None:
        super().__init__(unet)
        # without a limit and kept even if slower: what is measured here is the plan, whatever it is
        on_cpu = self.device.type == "cpu"
        config = Config(allow_cpu=on_cpu, graph_memory_mb=0, drop_slower=False, triton=triton)
        self.accelerator = accelerate(unet, replace(config, faster_sums=faster_sums, eight_bits=eight_bits))

    def remark(self) -> str | None:
        report = self.accelerator.report.as_dict()
        if report["last_error"]:
            return f"{report['last_error']['stage']}: {report['last_error']['message']}"
        if report["reasons"]:
            return f"the original forward ran: {'; '.join(report['reasons'])}"
        status = self.accelerator.status()
        unused = (status.get("eight_bits") or {}).get("reason") if self.accelerator.config.eight_bits else None
        if unused:
            return str(unused["text"])
        return None if status["plans"] else "no plan ran"

    def plan(self) -> dict[str, Any] | None:
        """The status of the plan that ran last."""
        plans = self.accelerator.status()["plans"]
        return plans[-1] if plans else None

    def stop(self) -> None:
        self.accelerator.release()


ENGINES: dict[str, type[Engine]] = {
    "sfast": StableFast,
    "eager": Eager,
    "eager-channels-last": EagerChannelsLast,
    "cudagraph": CudaGraph,
    "torch-compile": TorchCompile,
    "torch-compile-blocks": TorchCompileBlocks,
}
NEEDS_GPU = frozenset({"cudagraph"})


class Clock:
    """Times calls: by events on a GPU, with no waiting between calls, by `timer` on a CPU."""

    def __init__(self, device: torch.device, timer: Timer = timer) -> None:
        self.device, self._timer = device, timer

    def times(self, call: Call, count: int) -> list[float]:
        """Milliseconds of each of `count` calls in a row, after one that is not counted. On a CPU whose clock is too
        coarse for one call, they are fewer, each the mean of several."""
        call()
        machine.synchronise(self.device)
        if self.device.type != "cuda":
            return self._timer.times(call, count)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        machine.synchronise(self.device)
        return [start.elapsed_time(end) for start, end in zip(marks, marks[1:])]
