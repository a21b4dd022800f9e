"""Random operands, the comparison with float64, and the end of what is compiled beside all else."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext import environment
from sfast_ext.kernels.backend import cuda_libraries, nvrtc, precompile
from sfast_ext.kernels.backend.registry import Kernel
from sfast_ext.kernels.group_norm import one_pass, two_pass

HALF = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALF)

# Relative and absolute error allowed against float64.
TOLERANCE = {
    torch.float32: (1e-5, 1e-5),  # sums of up to some thousand values, in another order
    torch.float16: (1e-3, 2e-5),  # one rounding, 2**-11, and what float32 leaves; small results are subnormal
    torch.bfloat16: (8e-3, 1e-4),  # 2**-8 rounded on a card; the interpreter cuts off instead, 2**-7
}


def needs_products(dtype: torch.dtype) -> None:
    """Skips a test of matrix products in a dtype that torch does not multiply on a CPU."""
    if dtype == torch.float16 and environment.TORCH < (2, 2):
        pytest.skip("torch before 2.2 multiplies no float16 on a CPU")


def randn(*shape: int, dtype: torch.dtype, device: torch.device, mean: float = 0.0, std: float = 1.0) -> Tensor:
    # no numbers are drawn for a tensor that has none
    given = torch.empty(shape, device=device) if device.type == "meta" else torch.randn(shape)
    return (given * std + mean).to(dtype).to(device)


def wide(value: Any) -> Any:
    """Tensors in float64 on the CPU, everything else as it is."""
    return value.detach().cpu().double() if isinstance(value, Tensor) else value


def expected(module: ModuleType | Kernel, *args: Any, **kwargs: Any) -> Any:
    """The reference on the same values in float64."""
    kwargs.pop("out_dtype", None)
    return module.reference(*map(wide, args), **{name: wide(value) for name, value in kwargs.items()})


def expected_there(module: ModuleType | Kernel, *args: Any) -> Any:
    """`expected`, computed where the operands are: large ones take a CPU long."""
    found = module.reference(*(x.double() if isinstance(x, Tensor) else x for x in args))
    return tuple(x.cpu() for x in found) if isinstance(found, tuple) else found.cpu()


def close(actual: Tensor, target: Tensor, scale: float = 1.0) -> None:
    """Compares with a float64 target, within the tolerance of the actual dtype, times scale."""
    relative, absolute = TOLERANCE[actual.dtype]
    torch.testing.assert_close(wide(actual), target, rtol=relative * scale, atol=absolute * scale)


def close_rows(actual: Tensor, target: Tensor, scale: float = 1.0) -> None:
    """Compares with a float64 target by the relative L2 error of each row: what is weighed by rounded probabilities
    may have single elements near zero."""
    assert actual.shape == target.shape
    error = (wide(actual) - target).norm(dim=-1)
    bound = TOLERANCE[actual.dtype][0] * scale * target.norm(dim=-1)
    assert bool((error <= bound).all()), f"{(error / target.norm(dim=-1)).max()} in a row"


def heads(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Q, K and V of (batch, heads, queries, keys, size), taken out of the last dimension of products as a UNet does."""
    batch, count, queries, keys, size = shape
    q = randn(batch, queries, count * size + 8, dtype=dtype, device=device)[..., 8:]
    both = randn(batch, keys, 2 * count * size, dtype=dtype, device=device)
    return [x.unflatten(-1, (count, size)).transpose(1, 2) for x in (q, *both.chunk(2, -1))]


def attended(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attention in float64, on the CPU in the end."""
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale).cpu()


def needs_nvrtc() -> None:
    """Skips if there is no NVRTC, as beside a torch for CPUs; one that does not work is a failure."""
    if not cuda_libraries.candidates(cuda_libraries.folders()):
        pytest.skip("needs NVRTC, which torch for CUDA brings")
    nvrtc.loaded_nvrtc()


def driver_copies(to: Tensor, source: Tensor, size: int, stream: int) -> None:
    """A copy by the driver, which is no kernel."""
    place = ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(source.data_ptr())
    assert cuda_libraries.driver().cuMemcpyDtoDAsync_v2(*place, ctypes.c_size_t(size), ctypes.c_void_p(stream)) == 0


def driver_zeros(to: Tensor, size: int, stream: int) -> None:
    """Zeros by the driver, which is no kernel."""
    place, nothing = ctypes.c_void_p(to.data_ptr()), ctypes.c_ubyte(0)
    assert cuda_libraries.driver().cuMemsetD8Async(place, nothing, ctypes.c_size_t(size), ctypes.c_void_p(stream)) == 0


def few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of few parts have too many of them for a program that normalises."""
    monkeypatch.setattr(two_pass, "MAX_PARTS", 2)
    monkeypatch.setattr(two_pass, "_FEW", 2)


def paths(rest: str, pixels: int, groups: int, width: int) -> list[str]:
    """Names of the ways to the group norm of such an image that differ, `rest` being what any other ends in."""
    parts = one_pass.parts(pixels, groups, width)
    found = ["whole"] if one_pass.whole(pixels, groups, width) is not None else []
    if parts is not None:
        found += ["parts"] if parts.parts == 1 else ["parts", "many parts"]
    return [*found, rest]


each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
half_dtype = pytest.mark.parametrize("dtype", HALF, ids=lambda dtype: str(dtype).removeprefix("torch."))


def finish() -> None:
    """Waits for what is compiled beside all else."""
    thread = precompile._background._thread
    if thread is not None:
        thread.join(300)
        assert not thread.is_alive()
