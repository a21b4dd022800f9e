"""Cases of the kernels for diffusion transformers: `CASES`, by kernel, as in cases.py. Shapes are those of an image of
1024x1024 with 256 tokens of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.quantisers import largest_group, torch_quantise_rows

# images, tokens, channels: Z-Image, Lumina 2, Anima
ROWS = [(1, 4352, 3840), (2, 4352, 2304), (2, 4096, 2048)]
# images, tokens, heads, columns of a head, form; of packed queries, keys and values
HEADS = [(1, 4352, 30, 128, "complex"), (2, 4352, 24, 96, "complex"), (2, 4096, 16, 128, "halves")]
HEADS += [(1, 4608, 24, 128, "neighbours")]
# rows, columns: Z-Image, Lumina 2
GATED = [(4352, 10240), (8704, 9216)]
# rows, columns of the result, inner dimension: Flux and Chroma
GELU = [(4096, 12288, 3072), (4608, 12288, 3072)]

# rows, columns, how it is approximated: Anima, Flux and Chroma
GELU8 = [(8192, 8192, "none"), (4608, 12288, "tanh")]


def torch_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """As diffusers' RMSNorm writes it."""
    y = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) if weight is None else y.to(weight.dtype) * weight


def torch_rotary(x: Tensor, cosine: Tensor, sine: Tensor | None, form: str) -> Tensor:
    """As diffusers' `apply_rotary_emb` writes it."""
    if form == "complex":
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * torch.view_as_complex(cosine)).flatten(3).type_as(x)
    assert sine is not None
    if form == "neighbours":
        real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        turned = torch.stack([-imaginary, real], dim=-1).flatten(3)
    else:
        real, imaginary = x.reshape(*x.shape[:-1], 2, -1).unbind(-2)
        turned = torch.cat([-imaginary, real], dim=-1)
    return (x.float() * cosine + turned.float() * sine).to(x.dtype)


def torch_norm_rotary(
    x: Tensor, weight: Tensor, eps: float, cosine: Tensor, sine: Tensor | None, form: str
) -> Tensor:
    """As blocks of diffusers write it."""
    return torch_rotary(torch_rms_norm(x, weight, eps), cosine, sine, form)


def torch_modulated_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    scale: Tensor,
    shift: Tensor | None,
    rms: bool,
    plus_one: bool,
) -> Tensor:
    """As blocks of diffusers write it."""
    y = torch_rms_norm(x, weight, eps) if rms else F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    y = y * (1 + scale if plus_one else scale)
    return y if shift is None else y + shift


def torch_gated_residual(
    x: Tensor, y: Tensor, gate: Tensor, weight: Tensor | None, eps: float | None, tanh: bool
) -> Tensor:
    """As blocks of diffusers write it."""
    return x + (gate.tanh() if tanh else gate) * (y if eps is None else torch_rms_norm(y, weight, eps))


def torch_gated_norm(
    x: Tensor, y: Tensor, gate: Tensor, inner: Tensor | None, inner_eps: float | None, tanh: bool, *norm: Any
) -> tuple[Tensor, Tensor]:
    """As blocks of diffusers write it."""
    total = torch_gated_residual(x, y, gate, inner, inner_eps, tanh)
    return total, torch_modulated_norm(total, *norm)


def torch_swiglu(gate: Tensor, value: Tensor) -> Tensor:
    """As blocks of diffusers write it."""
    return F.silu(gate) * value


def heads(o: Any, sizes: tuple[int, int, int, int, str]) -> list[Any]:
    """The arguments of `norm_rotary.launch`: queries of a packed product, and angles of all tokens."""
    images, tokens, count, columns, form = sizes
    x = o.randn(images, tokens, 3 * count * columns)[..., : count * columns].unflatten(-1, (count, columns))
    angle = torch.randn(1, tokens, 1, columns // 2, device=x.device)
    if form == "complex":
        angles = [torch.view_as_real(torch.polar(torch.ones_like(angle), angle)), None]
    else:
        angle = angle.repeat_interleave(2, -1) if form == "neighbours" else torch.cat([angle, angle], -1)
        angles = [angle.cos(), angle.sin()]
    return [x, o.randn(columns), 1e-5, *angles, form]


def _vectors(o: Any, images: int, channels: int) -> list[Tensor]:
    return list(o.randn(images, 1, 4 * channels).chunk(4, -1))


def _norm_rotary(o: Any, case: Callable[..., Any]) -> Iterator[Any]:
    for sizes in HEADS:
        yield case("norm_rotary", "x".join(map(str, sizes)), torch_norm_rotary, heads(o, sizes), {})


def _norms(o: Any, images: int, channels: int) -> list[list[Any]]:
    """Of Z-Image and Lumina 2, and of the others."""
    scale, shift, *_ = _vectors(o, images, channels)
    return [[o.randn(channels), None, 1e-5, scale, None, True, True], [None, None, 1e-6, scale, shift, False, True]]


def _modulated_norm(o: Any, case: Callable[..., Any]) -> Iterator[Any]:
    for images, tokens, channels in ROWS:
        for kind, norm in zip(("RMS", "layer"), _norms(o, images, channels)):
            x = o.randn(images, tokens, channels)
            yield case("modulated_norm", f"{kind}, {images}x{tokens}x{channels}", torch_modulated_norm, [x, *norm], {})


def _gates(o: Any, images: int, tokens: int, channels: int) -> list[list[Any]]:
    x, y = (o.randn(images, tokens, channels) for _ in range(2))
    gate = _vectors(o, images, channels)[2]
    return [[x, y, gate, o.randn(channels), 1e-5, True], [x, y, gate, None, None, False]]


def _gated_residual(o: Any, case: Callable[..., Any]) -> Iterator[Any]:
    for sizes in ROWS:
        for kind, gates in zip(("RMS, tanh", "plain"), _gates(o, *sizes)):
            name = f"{kind}, {'x'.join(map(str, sizes))}"
            yield case("gated_residual", name, torch_gated_residual, gates, {})


def _gated_norm(o: Any, case: Callable[..., Any]) -> Iterator[Any]:
    for sizes in ROWS:
        both = zip(("RMS", "layer"), _gates(o, *sizes), _norms(o, sizes[0], sizes[2]))
        for kind, gates, norm in both:
            name = f"{kind}, {'x'.join(map(str, sizes))}"
            yield case("gated_norm", name, torch_gated_norm, [*gates, *norm], {})


def _swiglu(o: Any, case: Callable[..., Any]) -> Iterator[Any]:
    for rows, columns in GATED:
        gate, value = o.randn(rows, 2 * columns).chunk(2, -1)
        yield case("swiglu", f"{rows}x{columns}", torch_swiglu, [gate, value], {})


def torch_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As blocks of diffusers write it."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def _linear_gelu(o: Any, case: Callable[..., Any]) -> Iterator[Any]:
    for rows, columns, inner in GELU:
        tensors = [o.randn(rows, inner), o.randn(columns, inner) * inner**-0.5, o.randn(columns)]
        yield case("linear_gelu", f"{rows}x{columns}x{inner}", torch_linear_gelu, tensors, {})


def torch_modulated_norm8(x: Tensor, *norm: Any, group: int) -> tuple[Tensor, Tensor]:
    """By PyTorch's operations, as what follows."""
    return torch_quantise_rows(torch_modulated_norm(x, *norm), group)


def torch_gated_norm8(*given: Any, group: int) -> tuple[Tensor, Tensor, Tensor]:
    total, normed = torch_gated_norm(*given)
    return total, *torch_quantise_rows(normed, group)


def torch_swiglu8(gate: Tensor, value: Tensor, group: int) -> tuple[Tensor, Tensor]:
    return torch_quantise_rows(torch_swiglu(gate, value), group)


def torch_gelu8(x: Tensor, approximate: str, group: int) -> tuple[Tensor, Tensor]:
    return torch_quantise_rows(F.gelu(x, approximate=approximate), group)


def _group(columns: int) -> dict[str, int]:
    return {"group": largest_group(columns)}


def _modulated_norm8(o: Any, case: Callable[..., Any]) -> Iterator[Any]:
    for sizes in ROWS:
        given = [o.randn(*sizes), *_norms(o, sizes[0], sizes[2])[0]]
        yield case("modulated_norm8", "x".join(map(str, sizes)), torch_modulated_norm8, given, _group(sizes[2]))


def _gated_norm8(o: Any, case: Callable[..., Any]) -> Iterator[Any]:
    for sizes in ROWS:
        given = [*_gates(o, *sizes)[0], *_norms(o, sizes[0], sizes[2])[0]]
        yield case("gated_norm8", "x".join(map(str, sizes)), torch_gated_norm8, given, _group(sizes[2]))


def _swiglu8(o: Any, case: Callable[..., Any]) -> Iterator[Any]:
    for rows, columns in GATED:
        given = list(o.randn(rows, 2 * columns).chunk(2, -1))
        yield case("swiglu8", f"{rows}x{columns}", torch_swiglu8, given, _group(columns))


def _gelu8(o: Any, case: Callable[..., Any]) -> Iterator[Any]:
    for rows, columns, form in GELU8:
        yield case("gelu8", f"{rows}x{columns}", torch_gelu8, [o.randn(rows, columns), form], _group(columns))


CASES: dict[str, Callable[..., Iterator[Any]]] = {
    "norm_rotary": _norm_rotary,
    "modulated_norm": _modulated_norm,
    "gated_residual": _gated_residual,
    "gated_norm": _gated_norm,
    "swiglu": _swiglu,
    "linear_gelu": _linear_gelu,
    "modulated_norm8": _modulated_norm8,
    "gated_norm8": _gated_norm8,
    "swiglu8": _swiglu8,
    "gelu8": _gelu8,
}
