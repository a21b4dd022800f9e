"""A recorded forward in float32, operation by operation: what two results in bfloat16 are held against.

bfloat16 keeps 8 bits. After some 60 layers two correct results may differ by more than the tolerance, each within it
of the exact one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

_ROUNDED = (torch.bfloat16, torch.float16)
PEAK_FACTOR = 2.5
"""The memory it takes, of the forward's own: values are twice as large, and one weight is converted at a time."""


class ExactRun(fx.Interpreter):
    """Runs a captured graph with every value in half precision in float32."""

    def run_node(self, n: fx.Node) -> Any:
        """The result of a node; half precision never leaves one."""
        return map_aggregate(super().run_node(n), _wide)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operation; a dtype that it is asked for is replaced as well."""
        return super().call_function(target, map_aggregate(args, _wide), map_aggregate(kwargs, _wide))  # type: ignore[arg-type]


def _wide(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.float() if x.dtype in _ROUNDED else x
    return torch.float32 if x in _ROUNDED else x


def exact(graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a captured graph in float32."""
    with torch.inference_mode(False), torch.no_grad(), _no_benchmark():
        return list(ExactRun(graph_module).run(*inputs, enable_io_processing=False))


@contextlib.contextmanager
def _no_benchmark() -> Iterator[None]:
    """cuDNN chooses by its heuristics: to time algorithms for convolutions that run once takes seconds."""
    cudnn = torch.backends.cudnn
    if not cudnn.benchmark or torch.backends.flags_frozen():
        yield
        return
    cudnn.benchmark = False
    try:
        yield
    finally:
        cudnn.benchmark = True
