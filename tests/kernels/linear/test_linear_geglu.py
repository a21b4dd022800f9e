from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kernels.support import close, expected, half_dtype, randn
from sfast_ext.kernels.backend import nvrtc
from sfast_ext.kernels.linear import linear_geglu

# rows of x, width of the result, terms of a sum
SIZES = [((130,), 136, 72), ((1,), 8, 8), ((2, 3, 50), 128, 64), ((127,), 200, 136), ((2, 257), 264, 320)]


@pytest.fixture
def device(device):
    if device.type == "cpu":
        pytest.skip("no kernel of Triton's: runs on a GPU only")
    return device


@pytest.fixture(autouse=True)
def however_few_tiles(monkeypatch):
    """By the kernel also if a product and another kernel would be faster."""
    monkeypatch.setattr(linear_geglu, "_MIN_SHARE", 0)


def operands(rows, half, depth, dtype, device):
    x = randn(*rows, depth, dtype=dtype, device=device)
    weight = randn(2 * half, depth, dtype=dtype, device=device, std=depth**-0.5)
    return x, weight, randn(2 * half, dtype=dtype, device=device)


@half_dtype
@pytest.mark.parametrize(("rows", "half", "depth"), SIZES, ids=str)
def test_sizes(device, dtype, rows, half, depth):
    x, weight, bias = operands(rows, half, depth, dtype, device)
    y = linear_geglu.launch(x, weight, bias)
    assert y.shape == (*rows, half) and y.dtype == dtype
    close(y, expected(linear_geglu, x, weight, bias), scale=4)


@half_dtype
@pytest.mark.parametrize("tile", linear_geglu.TILES, ids=str)
@pytest.mark.parametrize(("rows", "half", "depth"), [((700,), 136, 72), ((129,), 8, 64), ((2560,), 648, 200)], ids=str)
def test_tiles(device, tile, rows, half, depth, dtype):
    x, weight, bias = operands(rows, half, depth, dtype, device)
    y = linear_geglu._launch(x, weight, bias, tile)
    close(y, expected(linear_geglu, x, weight, bias), scale=4)


def test_gates_that_are_large(device):
    x = torch.ones(9, 8, dtype=torch.float16, device=device)
    gates = [0.0, 1e-4, -1e-4, 5.0, -5.0, 30.0, -30.0, 6e4, -6e4, float("inf"), 10.0, 1.0, -1.0, 3.0, -3.0, 0.5]
    weight = torch.zeros(32, 8, dtype=torch.float16, device=device)
    bias = torch.tensor([1.0] * 16 + gates, dtype=torch.float16, device=device)
    for approximate in ("none", "tanh"):
        y = linear_geglu.launch(x, weight, bias, False, approximate)
        close(y, expected(linear_geglu, x, weight, bias, False, approximate), scale=4)
    bias[20] = float("nan")
    y = linear_geglu.launch(x, weight, bias)
    assert y[:, 4].isnan().all() and y.isnan().sum() == 9


def test_without_the_kernel(device, monkeypatch):
    def broken(*args, **kwargs):
        raise nvrtc.Unavailable("no")

    x, weight, bias = operands((70,), 72, 64, torch.float16, device)
    monkeypatch.setattr(linear_geglu, "_launch", broken)
    close(linear_geglu.launch(x, weight, bias), expected(linear_geglu, x, weight, bias), scale=50)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("biased", [False, True])
def test_which_half_which_gelu(device, biased, approximate, gate_first):
    x, weight, bias = operands((70,), 72, 64, torch.float16, device)
    bias = bias if biased else None
    y = linear_geglu.launch(x, weight, bias, gate_first, approximate)
    close(y, expected(linear_geglu, x, weight, bias, gate_first, approximate), scale=4)


def test_strided_inputs(device):
    x, weight, bias = operands((6, 40), 72, 64, torch.float16, device)
    for some in (x[1:], x[:, ::2], x.transpose(0, 1), randn(40, 80, dtype=torch.float16, device=device)[:, 8:72]):
        close(linear_geglu.launch(some, weight, bias), expected(linear_geglu, some, weight, bias), scale=4)
    wide = randn(144, 80, dtype=torch.float16, device=device, std=0.1)[:, 8:72]
    spaced = randn(288, dtype=torch.float16, device=device)[::2]
    # this weight goes to the product and the kernel for GEGLU, which round in between
    close(linear_geglu.launch(x, wide, bias), expected(linear_geglu, x, wide, bias), scale=50)
    close(linear_geglu.launch(x, weight, spaced), expected(linear_geglu, x, weight, spaced), scale=4)


def test_what_the_kernel_does_not_take(device):
    half_ = torch.float16
    for dtype, half, depth in ((torch.float32, 8, 8), (torch.float64, 8, 8), (half_, 7, 8), (half_, 8, 5)):
        x, weight, bias = operands((9,), half, depth, dtype, device)
        close(linear_geglu.launch(x, weight, bias).float(), expected(linear_geglu, x, weight, bias), scale=1000)
    assert linear_geglu.launch(torch.empty(0, 8, device=device), torch.ones(16, 8, device=device), None).shape == (0, 8)


def test_results_repeat_and_nan_stays_in_its_row(device):
    x, weight, bias = operands((150,), 136, 64, torch.float16, device)
    first = linear_geglu.launch(x, weight, bias)
    assert torch.equal(first, linear_geglu.launch(x, weight, bias))
    x[3, 5] = float("nan")
    y = linear_geglu.launch(x, weight, bias)
    assert y[3].isnan().all()
    y[3] = first[3]
    assert torch.equal(y, first)


def test_reference_is_torch():
    x, weight, bias = operands((9,), 12, 5, torch.float32, torch.device("cpu"))
    value, gate = F.linear(x, weight, bias).chunk(2, -1)
    torch.testing.assert_close(linear_geglu.reference(x, weight, bias), value * F.gelu(gate))
    torch.testing.assert_close(linear_geglu.reference(x, weight, bias, True), gate * F.gelu(value))


def test_the_quickest_tile(monkeypatch):
    monkeypatch.setattr(linear_geglu, "multiprocessors", lambda device: 132)

    def best(rows, half, depth):
        x, weight = (torch.empty(n, depth, dtype=torch.float16, device="meta") for n in (rows, 2 * half))
        return linear_geglu.best(x, weight)

    assert best(2048, 5120, 1280)[::3] == (160, 2)
    assert best(8192, 1280, 320)[::3] == (128, 2)
    assert best(384, 5120, 1280)[::3] == (128, 1)  # three tiles of rows: a pair would compute a fourth


def test_few_tiles_are_left_to_cublas(monkeypatch):
    monkeypatch.setattr(linear_geglu, "_MIN_SHARE", 0.9)
    monkeypatch.setattr(linear_geglu, "multiprocessors", lambda device: 132)
    weight = torch.empty(10240, 1280, device="meta")
    assert linear_geglu.profitable(torch.empty(256, 1280, device="meta"), weight)
    assert not linear_geglu.profitable(torch.empty(128, 1280, device="meta"), weight)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize(
    ("rows", "half", "depth"),
    [(8192, 1280, 320), (2048, 2560, 640), (2048, 5120, 1280), (8192, 2560, 640), (512, 5120, 1280), (7345, 2568, 648)],
)
def test_unet_shapes(dtype, rows, half, depth):
    x, weight, bias = operands((2, rows // 2) if rows % 2 == 0 else (rows,), half, depth, dtype, torch.device("cuda"))
    y = linear_geglu.launch(x, weight, bias)
    target = linear_geglu.reference(x.double(), weight.double(), bias.double()).cpu()
    close(y, target, scale=4)


@pytest.mark.gpu
def test_beyond_32_bits():
    x, weight, bias = operands((140000,), 16384, 64, torch.float16, torch.device("cuda"))  # 2.3e9 values
    y = linear_geglu.launch(x, weight, bias)
    for rows in (slice(0, 8), slice(131000, 131200), slice(-5, None)):
        close(y[rows], linear_geglu.reference(x[rows].double(), weight.double(), bias.double()).cpu(), scale=4)
