"""How far a forward's result moves if each operation rounds otherwise: what a plan's difference is judged by.

A plan computes the same sums in another order, and rounds some values less often. Both results are correct. How far two
correct results are apart depends on the model, the input and the dtype: 1e-6 to 0.02. So it is measured, on the input
in question: the original forward runs again, and each value that an operation makes is rounded to fewer bits.

bfloat16 keeps 8 bits. After some 60 layers two correct results may differ by more than the tolerance, each within it of
the exact one. They are compared with a run in float32, operation by operation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from sfast_ext import fp32_precision
from sfast_ext.call_signature import flatten_output
from sfast_ext.preparation import Interrupted
from sfast_ext.report import logger

_INTEGERS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_BITS = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 3, torch.float64: 3}
"""Bits that are given up. Products in half precision are summed up in float32, and rounded once. In float32 the order
of a sum of thousands of products costs a few bits."""
_TF32_BITS = 13
"""TF32 has 10 bits of the 23."""
_CHUNK = 1 << 22
"""Elements that are rounded at once: so little memory is enough."""


def rounded_otherwise(run: Callable[[], Any]) -> list[torch.Tensor] | None:
    """The tensors of a forward's result if each operation gives up bits. None if it cannot run so: memory is short, or
    it does not run under a mode of torch."""
    try:
        with torch.no_grad(), _GivingUpBits():
            result = run()
        return flatten_output(result)[1]
    except Interrupted:
        raise
    except Exception:
        logger.debug("what rounding moves a result by could not be measured", exc_info=True)
        return None


class _GivingUpBits(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = getattr(func, "_schema", None)
        if schema is None:
            return result
        results = result if isinstance(result, (list, tuple)) else (result,)
        given: set[int] | None = None
        for value, declared in zip(results, schema.returns):
            if type(value) is not torch.Tensor or value.dtype not in _INTEGERS or declared.alias_info is not None:
                continue
            if value.layout is not torch.strided:
                continue
            if given is None:
                given = set(_memory((args, kwargs)))
            # without an input it is a constant. Some operations return an input although their schema does not say so.
            if given and value.untyped_storage()._cdata not in given:
                _give_up(value)
        return result


def _memory(value: Any) -> Iterator[int]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value.untyped_storage()._cdata
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _memory(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _memory(each)


def _give_up(x: torch.Tensor) -> None:
    """Round to fewer bits, half to even. In place: the value is new. Zero, infinity and what has few bits stay."""
    bits = _bits(x)
    half, mask = (1 << (bits - 1)) - 1, -(1 << bits)
    for part in _parts(x):
        integers = part.view(_INTEGERS[x.dtype])
        up = (integers >> bits).bitwise_and_(1)
        integers.add_(up.add_(half) if half else up).bitwise_and_(mask)


def _bits(x: torch.Tensor) -> int:
    if x.dtype is torch.float32 and x.is_cuda and _in_tf32():
        return _TF32_BITS
    return _BITS[x.dtype]


def _in_tf32() -> bool:
    return fp32_precision.matmul_in_tf32() or fp32_precision.read_conv() in (True, "tf32")


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if x.numel() <= _CHUNK:
        return (x,)
    if x.is_contiguous():
        return x.view(-1).split(_CHUNK)
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x.permute(0, 2, 3, 1).view(-1).split(_CHUNK)
    return x.unbind(0)


_ROUNDED = (torch.bfloat16, torch.float16)
PEAK_FACTOR = 2.5
"""The memory that a run in float32 takes, of the forward's own: values are twice as large, and one weight is converted
at a time."""


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
