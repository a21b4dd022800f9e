"""A weight in 8 bits, written as comfy_kitchen writes its own: a class whose operations are those of its codes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

aten = torch.ops.aten
INT8, FP8, FP8_WIDE = "TensorWiseINT8Layout", "TensorCoreFP8E4M3Layout", "TensorCoreFP8E5M2Layout"
STORED = {INT8: torch.int8, FP8: torch.float8_e4m3fn, FP8_WIDE: torch.float8_e5m2}
LARGEST = {INT8: 127, FP8: 448, FP8_WIDE: 57344}


@dataclasses.dataclass(frozen=True)
class Params:
    scale: Tensor
    orig_dtype: torch.dtype
    orig_shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class IntegerParams(Params):
    is_weight: bool = True
    convrot: bool = False
    convrot_groupsize: int = 256
    transposed: bool = False


@dataclasses.dataclass(frozen=True)
class BlockParams(Params):
    block_scale: Any = None


class QuantizedTensor(torch.Tensor):
    def __new__(cls, codes: Tensor, layout: str, params: Params) -> QuantizedTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, params.orig_shape, device=codes.device, dtype=params.orig_dtype, requires_grad=False
        )

    def __init__(self, codes: Tensor, layout: str, params: Params) -> None:
        self._qdata, self._layout_cls, self._params = codes, layout, params

    def like(self, codes: Tensor, **changes: Any) -> QuantizedTensor:
        return type(self)(codes, self._layout_cls, dataclasses.replace(self._params, **changes))

    def data_ptr(self) -> int:
        return self._qdata.data_ptr()

    def dequantize(self) -> Tensor:
        params = self._params
        scale = params.scale if params.scale.dim() < 2 else params.scale.view(-1, 1)
        wide = self._qdata.to(params.orig_dtype) * scale.to(params.orig_dtype)
        return wide.t() if getattr(params, "transposed", False) else wide

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, first = kwargs or {}, args[0]
        if func is aten.detach.default:
            return first.like(first._qdata.detach(), scale=first._params.scale.clone())
        if func in (aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default):
            wanted = kwargs.get("dtype") or next((a for a in args[1:] if isinstance(a, torch.dtype)), None)
            same = wanted in (None, first._params.orig_dtype) and func is not aten._to_copy.default
            changes = {"scale": first._params.scale.clone(), "orig_dtype": wanted or first._params.orig_dtype}
            return first if same else first.like(first._qdata, **changes)
        if func is aten.copy_.default:
            first._qdata.copy_(args[1]._qdata)
            first._params.scale.copy_(args[1]._params.scale)
            return first
        if func is aten.t.default and first._layout_cls == INT8:
            shape = tuple(reversed(first._params.orig_shape))
            return first.like(first._qdata, orig_shape=shape, transposed=not first._params.transposed)
        if func is aten.linear.default and args[1]._layout_cls == INT8:
            return product(*args)
        if func is aten.addmm.default and args[2]._layout_cls == INT8:
            return product(args[1], args[2], first)
        if func is aten.mm.default and args[1]._layout_cls == INT8:
            return product(*args)
        return func(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})


QuantizedTensor.__module__ = "comfy_kitchen.tensor.base"


def plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, QuantizedTensor) else value


def product(x: Tensor, weight: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """Of integers: rows of the input have a scale each, which is rounded to the input's dtype."""
    scale = (x.abs().amax(-1, keepdim=True).float() / 127).clamp(min=1e-30)
    codes = (x / scale.to(x.dtype)).round().clamp(-128, 127)
    sums = codes.float() @ weight._qdata.float().t()
    y = (sums * (scale * weight._params.scale.reshape(1, -1))).to(x.dtype)
    return y if bias is None else y + bias


def quantised(weight: Tensor, layout: str = INT8, rows: bool = False, **fields: Any) -> nn.Parameter:
    """A parameter of 8 bits, with a scale for the whole or for each row."""
    largest = weight.abs().amax(1, keepdim=True) if rows else weight.abs().amax()
    scale = (largest / LARGEST[layout]).float()
    codes = weight / scale
    codes = (codes.round() if layout == INT8 else codes).to(STORED[layout])
    kind = IntegerParams if layout == INT8 else Params
    params = kind(scale, fields.pop("dtype", weight.dtype), tuple(weight.shape), **fields)
    return nn.Parameter(QuantizedTensor(codes, layout, params), requires_grad=False)


class Layer(nn.Linear):
    """Casts its weight to its input's dtype, as Forge Neo's do."""

    def __init__(self, k: int, n: int, layout: str | None = INT8, bias: bool = True, **fields: Any) -> None:
        super().__init__(k, n, bias=bias)
        self.requires_grad_(False)
        if layout is not None:
            self.weight = quantised(self.weight.detach(), layout, **fields)

    def _apply(self, fn: Any, recurse: bool = True) -> Layer:
        """A new weight each time, as Forge Neo's make."""
        for name, value in self._parameters.items():
            if isinstance(value, QuantizedTensor):
                moved = value.like(fn(value._qdata), scale=fn(value._params.scale).clone())
                self.register_parameter(name, nn.Parameter(moved, requires_grad=False))
            elif value is not None:
                self.register_parameter(name, nn.Parameter(fn(value), requires_grad=False))
        return self

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight.to(dtype=x.dtype), self.bias)


class Net(nn.Module):
    """With two such layers between others."""

    def __init__(self, layout: str | None = INT8, **fields: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 16, 3, padding=1)
        self.norm = nn.LayerNorm(16)
        self.first, self.second = Layer(16, 32, layout, **fields), Layer(32, 16, layout, **fields)
        self.out = nn.Linear(16, 4)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).flatten(2).transpose(1, 2))
        return self.out(self.second(torch.nn.functional.gelu(self.first(y))) + y)
