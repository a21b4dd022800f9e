"""The errors of layers: which rows and pixels are measured, and by which operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sfast_ext.kernels.eight_bits import quantise_rows
from sfast_ext.passes import eight_bits_selection as selection
from sfast_ext.passes.eight_bits_selection import SAMPLE, errors_of, every, grid, hadamard, relative, rounded

from .support import randn

FEW = {
    # of the model itself, as it runs before
    "add", "arange", "cat", "clone", "copy_", "div", "mul", "mul_", "sub", "_to_copy", "constant_pad_nd", "fill_",
    "empty", "_softmax", "addmm", "mm", "bmm", "mean",
    # of none of them, 5 to 20 MB of system memory each
    "abs", "amax", "round", "dot", "stack",
    # without a kernel
    "view", "_unsafe_view", "reshape", "expand", "slice", "select", "permute", "transpose", "t", "unsqueeze", "detach",
    "alias", "as_strided", "new_zeros", "empty_strided", "empty_like",
}  # fmt: skip
"""The operations that measuring may take: each other loads kernels on a GPU, which stay in system memory."""


class Seen(TorchDispatchMode):
    """Notes the operations within."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def cases() -> Iterator[tuple[str, Callable[[], Tensor]]]:
    x, weight, turn = randn(2, 77, 256), randn(96, 256), hadamard(256, torch.device("cpu"))
    yield "linear", lambda: errors_of(x, weight, None)
    yield "rotated", lambda: errors_of(x, weight, turn)
    image, kernel = randn(2, 32, 20, 24).half(), randn(300, 32, 3, 3).half()
    for silu in (False, True):
        yield f"convolution, SiLU {silu}", lambda silu=silu: selection.errors_of_convolution(image, kernel, 2, silu)
    q, k, v = (randn(2, 3, 200, 32).half() for _ in range(3))
    yield "attention", lambda: selection.errors_of_attention(q, k, v, None)


@pytest.mark.parametrize("measure", [pytest.param(each, id=name) for name, each in cases()])
def test_few_operations_measure(measure: Callable[[], Tensor]) -> None:
    with torch.no_grad(), Seen() as seen:
        measure()
    assert seen.names and not seen.names - FEW


@pytest.mark.parametrize("shape", [(64,), (3, 64), (300, 64), (1, 1, 64), (2, 77, 64), (3, 701, 64), (2, 9, 31, 64)])
def test_a_sample_tells_the_error_of_all_rows(shape: tuple[int, ...]) -> None:
    x, weight = randn(*shape), randn(130, 64)
    plain, rotated = relative(errors_of(x, weight, hadamard(64, torch.device("cpu"))).tolist())
    rows = x.reshape(-1, 64).double()
    exact = rows @ weight.double().T
    turn = quantise_rows.hadamard(64)
    for found, t in ((plain, torch.eye(64, dtype=torch.float64)), (rotated, turn)):
        made = rounded((rows @ t).float()).double() @ rounded((weight.double() @ t).float()).double().T
        assert found == pytest.approx(float((made - exact).norm() / exact.norm()), rel=0.1)


@pytest.mark.parametrize("images, rows", [(1, 77), (2, 1024), (2, 7345), (3, 705), (256, 3)])
def test_the_first_row_of_each_image_is_measured(images: int, rows: int) -> None:
    """It alone is rounded: the others have one value each."""
    for image in {0, images // 2, images - 1}:
        x = torch.ones(images, rows, 64)
        assert relative(errors_of(x, torch.eye(64), None).tolist()) == (0, 0)
        x[image, 0] = randn(64)
        assert relative(errors_of(x, torch.eye(64), None).tolist())[0] > 0


def test_no_more_than_a_sample_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = selection.rounded
    monkeypatch.setattr(selection, "rounded", lambda rows, *rest: sizes.append(rows.shape[:-1].numel()) or real(rows))
    for shape in ((2, 7345, 64), (1000, 3, 64), (5000, 64), (1, 257, 64)):
        sizes.clear()
        errors_of(randn(*shape), randn(8, 64), None)
        assert SAMPLE // 3 <= sizes[0] <= SAMPLE
    for shape, stride in (((2, 32, 113, 65), 1), ((1, 32, 3, 1000), 2), ((1, 32, 1000, 1), 1), ((300, 32, 5, 7), 2)):
        sizes.clear()
        selection.errors_of_convolution(randn(*shape), randn(8, 32, 3, 3), stride, False)
        images = shape[0]
        assert 1 <= sizes[0] <= max(SAMPLE, images) and sizes[0] >= min(SAMPLE // 3, images)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_nothing_has_no_error(shape: tuple[int, ...]) -> None:
    assert relative(errors_of(torch.zeros(shape), randn(8, 64), None).tolist()) == (0, 0)
    empty = selection.errors_of_convolution(torch.zeros(0, 4, 3, 3), randn(8, 4, 3, 3), 1, False)
    assert relative(empty.tolist()) == (0, 0)


def test_columns_of_an_image_are_all_met() -> None:
    """Tokens are the pixels of an image, line after line."""
    for width in (32, 64, 96, 128):
        step = every(width * width, SAMPLE // 2)
        assert len({place % width for place in range(0, width * width, step)}) > width // 2


@pytest.mark.parametrize("count", [1, 2, 7, 255, 256, 257, 511, 8192])
@pytest.mark.parametrize("most", [0, 1, 3, 256])
def test_steps(count: int, most: int) -> None:
    taken = len(range(0, count, every(count, most)))
    assert 1 <= taken <= max(1, most) and taken >= min(count, most) / 3
    for other in (1, 5, 300):
        down, across = grid(count, other, most)
        assert -(-count // down) * -(-other // across) <= max(1, most) and abs(down - across) <= 1


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(1, 1), (1, 300), (40, 1), (5, 4), (33, 47)])
def test_pixels_of_a_convolution_are_those_of_the_image(size: tuple[int, int], stride: int) -> None:
    """Without rounding, what is compared is what the convolution makes: only a wrong pixel would differ."""
    x, weight = randn(2, 8, *size), randn(6, 8, 3, 3)
    exact = F.conv2d(x, weight, stride=stride, padding=1)
    norm, _, _ = selection.errors_of_convolution(x, weight, stride, False).tolist()
    steps = grid(*exact.shape[2:], SAMPLE // 2)
    down, across = (slice(min(s, n) // 2, None, s) for s, n in zip(steps, exact.shape[2:]))
    assert norm == pytest.approx(float(exact[:, :, down, across].square().sum()), rel=1e-4)


def test_rows_that_are_not_finite_and_rows_of_zeros() -> None:
    rows = randn(5, 64)
    rows[1] = 0
    rows[2, 7], rows[3, 9] = math.inf, math.nan
    found = rounded(rows)
    assert torch.equal(found[1], torch.zeros(64))
    assert found[2:4].isnan().all() and found[[0, 1, 4]].isfinite().all()
    q, scale = quantise_rows.reference(rows)
    assert torch.allclose(found[[0, 4]], (q * scale[:, None])[[0, 4]])


def test_relative_distances() -> None:
    assert relative([4.0, 1.0, 0.25]) == (0.5, 0.25)
    assert all(map(math.isnan, relative([math.inf, 1.0, 1.0])))
    # of zeros it is the distance itself
    assert relative([0.0, 9.0, 0.0]) == (3.0, 0.0)
    assert all(map(math.isnan, relative([math.nan, math.nan, math.nan])))
    assert all(map(math.isnan, relative([math.inf, math.inf, math.inf])))
