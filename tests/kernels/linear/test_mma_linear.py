"""Products on GeForce: who computes them, `mma_gemm` or PyTorch, and that measurements change no operand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import cuda_on_cpu
from sfast_ext.kernels.backend import choices, triton_runtime
from sfast_ext.kernels.backend.choices import Choices, Memory
from sfast_ext.kernels.conv import mma_conv2d
from sfast_ext.kernels.linear import linear_accumulate, linear_geglu, mma_choice, mma_gemm, mma_linear, mma_tiles
from sfast_ext.kernels.pointwise import geglu

GPU = torch.device("cuda", 0)
MORE = 2**-10
TILES = mma_tiles.shapes((8, 6), half_sums=False)[:2]
randn = torch.randn


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, **options: Any) -> Tensor:
    y = F.linear(x, weight, bias)
    return y if residual is None else residual.add_(y)


def gated(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any, **more: Any) -> Tensor:
    return geglu.reference(F.linear(x, weight, bias))


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int = 1, **options: Any) -> Tensor:
    return F.conv2d(x, weight, bias, padding=1, stride=stride)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bool]]]:
    """What the kernel was asked for, and whether with sums in half precision; its results are PyTorch's plus MORE."""
    found: list[tuple[str, bool]] = []

    def stand_in(name: str, way: Callable[..., Tensor], *args: Any, tile: mma_tiles.Tile, **given: Any) -> Tensor:
        found.append((name, given.pop("half_sums")))
        return way(*args, **given).add_(MORE)

    for name, way in (("linear", linear), ("linear_geglu", gated), ("conv2d", convolved)):
        monkeypatch.setattr(mma_gemm, name, functools.partial(stand_in, name, way))
        monkeypatch.setattr(mma_gemm, f"accepts_{name}", lambda *operands: None)
    monkeypatch.setattr(mma_gemm, "tiles", lambda *given, **flags: TILES)
    yield found


def operands(kernel: Any) -> tuple[Tensor, ...]:
    if kernel is mma_conv2d:
        return randn(1, 32, 6, 5), randn(8, 32, 3, 3), randn(8)
    if kernel is linear_accumulate:
        return randn(5, 64), randn(8, 64), randn(5, 8)
    return randn(5, 64), randn(8, 64), randn(8)


KERNELS = {mma_linear: "linear", mma_conv2d: "conv2d", linear_accumulate: "linear", linear_geglu: "linear_geglu"}
each = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.launch.name)
sums = pytest.mark.parametrize("half_sums", [False, True])


@pytest.fixture(params=[True, False], ids=["faster", "slower"])
def faster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the kernel is measured to be faster than PyTorch, with the second tile; each is run twice for that."""
    memory = Memory(None, {})

    def make(what: str) -> Choices:
        times = iter([2.0, 3.0, 1.0 if request.param else 3.0])

        def clock(run: choices.Run) -> float:
            run(), run()
            return next(times)

        return Choices(what, clock, lambda: True, lambda device: memory)

    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "_choice", mma_choice.MmaChoice(kernel.launch.name, make))
    return request.param


def call(kernel: Any, given: tuple[Tensor, ...], half_sums: bool) -> Tensor:
    """On copies: a sum is written over."""
    return kernel.launch(*(x.clone() for x in given), half_sums=half_sums).float()


@each
@sums
def test_the_faster_one_computes_it(asked, faster, kernel, half_sums) -> None:
    given = operands(kernel)
    plain = kernel.reference(*(x.clone() for x in given)).float()

    def more(y: Tensor) -> bool:
        """Whether the kernel computed it."""
        error = (y - plain - MORE).abs().max()
        return bool(error < MORE / 4) if kernel is not linear_accumulate else bool(asked)

    asked.clear()
    assert more(call(kernel, given, half_sums)) == half_sums  # not measured yet
    with choices.measuring(1.0):
        measured = call(kernel, given, half_sums)
    torch.testing.assert_close(measured, plain, atol=2 * MORE + 0.02 * (kernel is linear_accumulate), rtol=2e-3)
    assert set(asked) == {(KERNELS[kernel], half_sums)}
    asked.clear()
    assert more(call(kernel, given, half_sums)) == faster


def test_what_is_measured_with_exact_sums_says_nothing_of_others(asked, faster) -> None:
    given = operands(mma_linear)
    with choices.measuring(1.0):
        call(mma_linear, given, False)
    asked.clear()
    call(mma_linear, given, True)
    assert asked == [("linear", True)]


@each
def test_the_kernel_is_compiled_ahead(monkeypatch, asked, kernel) -> None:
    """And so is the one that follows PyTorch's product."""
    after: list[tuple[int, ...]] = []
    monkeypatch.setattr(linear_geglu, "accepts", lambda *args: "not here")
    monkeypatch.setattr(geglu, "launch", lambda product, *args: after.append(product.shape))
    given = [x.to("meta") for x in operands(kernel)]
    with triton_runtime.dry_run(GPU):
        kernel.launch(*given, half_sums=True)
    assert asked == [(KERNELS[kernel], True)] * len(TILES) and after == [(5, 8)] * (kernel is linear_geglu)


@each
def test_what_the_kernel_does_not_take_is_pytorchs(kernel) -> None:
    given = operands(kernel)
    y, target = call(kernel, given, True), kernel.reference(*given).float()
    torch.testing.assert_close(y, target, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kernel", [mma_linear, linear_geglu, linear_accumulate], ids=lambda kernel: kernel.launch.name)
@sums
def test_by_the_kernel_itself(monkeypatch, kernel, half_sums) -> None:
    """The kernel is launched through each of them, on this CPU."""
    cuda_on_cpu.stand_in(monkeypatch, mma_gemm)
    monkeypatch.setattr(linear_geglu, "accepts", lambda *args: "not here")
    chooser = Choices("it", lambda run: 0.0, lambda: False, lambda device: Memory(None, {}))
    monkeypatch.setattr(chooser, "_find", lambda device, key, ways, *others: list(ways)[-1])
    monkeypatch.setattr(kernel, "_choice", mma_choice.MmaChoice("it", lambda what: chooser))
    x, weight = randn(70, 64).half(), (randn(320, 64) / 8).half()
    third = randn(70, 320).half() if kernel is linear_accumulate else randn(320).half()
    target = kernel.reference(x, weight, third).float()
    launched: list[str] = []
    run = cuda_on_cpu.launch
    monkeypatch.setattr(
        "sfast_ext.kernels.backend.nvrtc.Source._launch",
        lambda source, *args, **given: (launched.append(source.name), run(source, *args, **given))[-1],
    )
    y = kernel.launch(x, weight, third, half_sums=half_sums)
    assert launched == ["mma_gemm"] and (kernel is not linear_accumulate or y is third)
    torch.testing.assert_close(y.float(), target, atol=4e-3, rtol=4e-3)
