"""The native operation, built for this run; and what runs where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sfast_ext import kernels, native
from sfast_ext.kernels import linear_add

from .support import expected, half_dtype, randn, wide

CUDA = torch.device("cuda")
ROWS, INNER, COLUMNS = (77, 154, 1000), (320, 768, 1280, 40), (320, 640, 8)


@pytest.fixture(scope="session")
def op(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """sfast_ext::linear_add of this source, not of what the user has built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("native")))
        native.build()
        assert native.load(), native.describe()["error"]
    return torch.ops.sfast_ext.linear_add


def operands(*rows: int, n: int, k: int, bias: bool = True, dtype: torch.dtype = torch.float16, device: Any = CUDA):
    """Such that the products, the bias and the residual are of one size: a lost one shows."""
    return (
        randn(*rows, k, dtype=dtype, device=device),
        randn(n, k, dtype=dtype, device=device, std=k**-0.5),
        randn(n, dtype=dtype, device=device) if bias else None,
        randn(*rows, n, dtype=dtype, device=device),
    )


def poison(*shape: int, dtype: torch.dtype) -> None:
    """Leaves NaN in the memory that a result of this shape, and a workspace, will be given."""
    torch.full(shape, float("nan"), dtype=dtype, device=CUDA)
    torch.full((32 << 20,), 255, dtype=torch.uint8, device=CUDA)


def error(actual: Tensor, target: Tensor) -> float:
    return ((wide(actual) - target).norm() / target.norm()).item()


def right(actual: Tensor, *args: Any) -> None:
    """Against float64: each value, and as a whole no further off than PyTorch's product and sum."""
    # where the operands are: a GPU is as good at float64, and quicker
    target = wide(linear_add.reference(*(arg if arg is None else arg.double() for arg in args)))
    assert actual.shape == target.shape and actual.dtype == args[0].dtype and actual.is_contiguous()
    # two roundings of values of a few units are allowed to each value
    rounding = 2.0**-9 if actual.dtype == torch.float16 else 2.0**-6
    torch.testing.assert_close(wide(actual), target, rtol=rounding, atol=2 * rounding)
    x, weight, bias, residual = args
    allowed = 1.05 * error(F.linear(x, weight, bias) + residual, target)
    # of a few values the errors are too much a matter of luck to be compared
    assert error(actual, target) <= (allowed if target.numel() >= 4096 else max(allowed, rounding / 4))


# --- the operation ---


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("n", COLUMNS)
@pytest.mark.parametrize("k", INNER)
@pytest.mark.parametrize("m", ROWS)
def test_shapes(op, m, k, n, bias, dtype):
    args = operands(m, n=n, k=k, bias=bias, dtype=dtype)
    before = [arg.clone() for arg in args if arg is not None]
    poison(m, n, dtype=dtype)
    right(op(*args), *args)
    for arg, copy in zip([arg for arg in args if arg is not None], before, strict=True):
        assert torch.equal(arg, copy)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(("m", "n", "k"), [(8192, 320, 1280), (2048, 1280, 5120), (512, 1280, 1280), (2, 1280, 320)])
def test_unet_shapes(op, m, n, k, dtype):
    args = operands(m, n=n, k=k, dtype=dtype)
    poison(m, n, dtype=dtype)
    right(linear_add.launch(*args), *args)


@pytest.mark.gpu
def test_strided_rows(op):
    x, weight, bias, residual = operands(2, 60, n=64, k=96)
    views = {
        "columns of more": (x[..., :40], weight[:, 8:48], bias, residual),
        "every other row": (x[:, ::2], weight, bias, residual[:, ::2]),
        "rows of one picture": (x[:, :33], weight, bias, residual[:, 27:]),
        "one picture": (x[1], weight, bias, residual[1]),
        "one row": (x[1, 3], weight, bias, residual[1, 3]),
        "part of the result's columns": (x, weight[8:40], bias[8:40], residual[..., 16:48]),
        "rows of packed weights": (x, weight[::2], bias[::2], residual[..., :32]),
        "columns first": (x.transpose(1, 2).contiguous().transpose(1, 2), weight.t().contiguous().t(), bias, residual),
        "one row for all": (x[:1, :1].expand(2, 60, 96), weight, bias, residual[:, :1].expand(2, 60, 64)),
        "in another order": (x, weight, bias, residual.view(60, 2, 64).transpose(0, 1)),
    }
    for name, args in views.items():
        try:
            right(op(*args), *args)
            right(linear_add.launch(*args), *args)
        except AssertionError as exc:
            raise AssertionError(name) from exc


@pytest.mark.gpu
def test_picture_in_nhwc(op):
    x, weight, bias, _ = operands(2, 8, 8, n=64, k=32)
    picture = randn(2, 64, 8, 8, dtype=torch.float16, device=CUDA).to(memory_format=torch.channels_last)
    for residual in (picture, picture.contiguous()):
        args = (x, weight, bias, residual.permute(0, 2, 3, 1))
        right(op(*args), *args)


@pytest.mark.gpu
def test_in_a_cuda_graph(op):
    args = operands(154, n=640, k=640)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        op(*args)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        first = op(*args)
        second = op(first, *args[1:3], first)  # its result and its workspace are the graph's, like the first's
    for _ in range(3):
        for arg in args:
            arg.copy_(torch.randn_like(arg) * arg.float().std())
        graph.replay()
        torch.cuda.synchronize()
        right(first, *args)
        right(second, first, *args[1:3], first)


@pytest.mark.gpu
def test_on_another_stream(op):
    args = operands(1000, n=320, k=1280)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        args[0].mul_(2)
        out = op(*args)
    side.synchronize()
    right(out, *args)


@pytest.mark.gpu
def test_nothing_to_do(op):
    for rows, n, k in ((0, 8, 40), (3, 0, 40)):
        args = operands(rows, n=n, k=k)
        assert op(*args).shape == (rows, n)
        assert linear_add.launch(*args).shape == (rows, n)
    x, weight, bias, residual = operands(3, n=8, k=40)
    assert torch.equal(op(x[:, :0], weight[:, :0], bias, residual), residual + bias)
    assert torch.equal(op(x[:, :0], weight[:, :0], None, residual), residual)


@pytest.mark.gpu
def test_what_it_refuses(op):
    x, weight, bias, residual = operands(6, n=8, k=40)
    refused = {
        "takes float16": (x.float(), weight.float(), None, residual.float()),
        "must be so too": (x, weight.bfloat16(), bias, residual),
        "must be there too": (x, weight, bias.cpu(), residual),
        "weight is|weight \\[": (x[:, :8], weight, bias, residual),
        "bias is not": (x, weight, bias[:4], residual),
        "residual is": (x, weight, bias, residual[:3]),
        "dimensions": (x, weight[None], bias, residual),
    }
    for words, args in refused.items():
        with pytest.raises(RuntimeError, match=words):
            op(*args)


@pytest.mark.gpu
def test_launch_takes_it(op, monkeypatch):
    args = operands(2, 77, n=320, k=768)
    target = op(*args)
    monkeypatch.setattr(linear_add.F, "linear", None)
    torch.testing.assert_close(linear_add.launch(*args), target)


@pytest.mark.gpu
def test_launch_leaves_the_rest(op):
    x, weight, bias, residual = operands(6, n=48, k=80)
    for args in (
        (x.float(), weight.float(), bias.float(), residual.float()),
        (x.reshape(-1)[1:401].view(5, 80), weight, bias, residual[:5]),  # begins at 2 bytes
        (x[:, :33], weight[:, :33], bias, residual),
        (x, weight[:33], bias[:33], residual[:, :33]),
        (x, weight[:40], bias[1:41], residual[:, :40]),
        (x, weight, bias, residual[:1]),
    ):
        out = linear_add.launch(*args)
        torch.testing.assert_close(out, F.linear(*args[:3]) + args[3], rtol=0, atol=0)


# --- without it ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_on_the_cpu_it_is_torch(dtype, bias):
    args = operands(2, 5, n=8, k=40, bias=bias, dtype=dtype, device="cpu")
    assert torch.equal(linear_add.launch(*args), F.linear(*args[:3]) + args[3])


def test_reference_rounds_once():
    args = operands(64, n=32, k=40, dtype=torch.bfloat16, device="cpu")
    target = expected(linear_add, *args)
    out = linear_add.reference(*args)
    assert out.dtype == torch.bfloat16 and target.dtype == torch.float64
    torch.testing.assert_close(out, target.to(torch.bfloat16), rtol=2**-7, atol=1e-6)
    assert error(out, target) < error(F.linear(*args[:3]) + args[3], target)


def test_no_algorithm_is_torch(monkeypatch):
    class Without:
        def linear_add(self, *args: Any) -> Tensor:
            raise NotImplementedError

    args = operands(3, n=8, k=40, dtype=torch.bfloat16, device="cpu")
    monkeypatch.setattr(linear_add, "_takes", lambda *args: True)
    monkeypatch.setattr(torch.ops, "sfast_ext", Without(), raising=False)
    assert torch.equal(linear_add.launch(*args), F.linear(*args[:3]) + args[3])


def test_needs_no_triton():
    assert kernels.serves(linear_add, torch.device("cpu"), triton=False)
