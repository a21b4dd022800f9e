"""Linear layers of 8-bit integers, with GEGLU and without: who computes them, and what happens to a residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from kernels import cuda_on_cpu
from kernels.support import randn
from sfast_ext import kernels
from sfast_ext.kernels.backend import choices, graph_memory, nvrtc, registry, triton_runtime
from sfast_ext.kernels.backend.choices import Choices, Memory
from sfast_ext.kernels.eight_bits import choice8, geglu8, linear8, mma_gemm8, wgmma_gemm8

pytestmark = pytest.mark.skipif(
    kernels.interpreted(), reason="the interpreter's run is of Triton's kernels, these run without TRITON_INTERPRET"
)
GPU = torch.device("cuda", 0)
HALF = torch.float16
each = pytest.mark.parametrize("kernel", [linear8, geglu8], ids=lambda kernel: kernel.launch.name)


def operands(rows: int = 70, columns: int = 320, depth: int = 128) -> tuple[Tensor, ...]:
    """With a bias."""
    x, weight = (torch.randint(-127, 128, size, dtype=torch.int8) for size in ((rows, depth), (columns, depth)))
    return (
        x,
        torch.rand(rows) + 0.5,
        weight,
        (torch.rand(columns) + 0.5) / (5400 * depth**0.5),
        torch.randn(columns).half(),
    )


def wide(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return given[0], given[1].double(), given[2], given[3].double(), given[4]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tiles of launches, on this CPU."""
    found: list[str] = []
    cuda_on_cpu.stand_in(monkeypatch, mma_gemm8)
    run = cuda_on_cpu.launch

    def launch(source: nvrtc.Source, *args: Any, **given: int) -> None:
        found.append(str(mma_gemm8.mma_gemm.tile_of(given)))
        run(source, *args, **given)

    monkeypatch.setattr(nvrtc.Source, "_launch", launch)
    return found


@each
@pytest.mark.parametrize("shape", [(70,), (2, 35), (7, 2, 5)], ids=str)
def test_it_is_launched_once(launched, kernel, shape) -> None:
    given = operands()
    target = kernel.reference(*wide(given), dtype=torch.float64)
    y = kernel.launch(given[0].view(*shape, -1), given[1].view(shape), *given[2:])
    assert len(launched) == 1 and y.dtype == HALF and y.shape == (*shape, target.shape[-1])
    torch.testing.assert_close(y.view(target.shape).double(), target, atol=3e-4, rtol=6e-4)


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_result_takes_the_place_of_the_residual(launched, with_bias) -> None:
    *given, bias = operands()
    added = bias if with_bias else None
    residual = randn(70, 320, dtype=HALF, device=torch.device("cpu"))
    target = linear8.reference(*given, added, residual, torch.float32)
    y = linear8.launch(*given, added, residual)
    assert y is residual and len(launched) == 1
    torch.testing.assert_close(y.float(), target, atol=2e-3, rtol=1e-3)


def test_the_reference_is_rounded_once_and_leaves_the_residual() -> None:
    given = operands(9, 16, 64)
    residual = randn(9, 16, dtype=torch.bfloat16, device=torch.device("cpu"))
    kept = residual.clone()
    y = linear8.reference(*given, residual, torch.bfloat16)
    assert torch.equal(residual, kept) and y.dtype == torch.bfloat16
    assert torch.equal(y, linear8.reference(*given, residual, torch.float32).bfloat16())
    exact = (given[0].long() @ given[2].long().t()).double() * given[1].double()[:, None] * given[3].double()
    torch.testing.assert_close(linear8.reference(*wide(given), dtype=torch.float64), exact + given[4].double())
    gated = geglu8.reference(*given, True, "tanh", torch.float32)
    gate, value = (exact + given[4].double()).chunk(2, -1)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh")
    torch.testing.assert_close(gated.double(), value * gelu, atol=1e-6, rtol=1e-5)


@each
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(5, 32, 96), (40, 32, 96), (40, 48, 36)])
def test_the_fallback_computes_the_reference(kernel, device, rows, columns, depth) -> None:
    """On a GPU, the second is by PyTorch's product of integers; no kernel takes any of them."""
    given = tuple(each.to(device) for each in operands(rows, columns, depth))
    residual = [torch.ones(rows, columns, device=device).half()] if kernel is linear8 else []
    for call in (kernel.fallback, kernel.launch):
        y = call(*given, *residual)
        torch.testing.assert_close(y, kernel.reference(*given, *residual), atol=2e-3, rtol=2e-3)
    assert all(bool((each == 1).all()) for each in residual)


def test_integers_that_pytorch_multiplies(monkeypatch) -> None:
    """As on a GPU that does, and on one that does not."""
    given, asked = operands(40, 32, 96), []
    product, probe = torch._int_mm, linear8._multiplies_integers.__wrapped__
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (asked.append(a.shape), product(a, b))[-1])
    assert probe(torch.device("cpu")) and asked == [(32, 32)]
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(linear8, "_multiplies_integers", lambda device: True)
    torch.testing.assert_close(linear8.fallback(*given), linear8.reference(*given))
    assert asked[1:] == [(40, 96)]
    few = given[0][:16], given[1][:16], *given[2:]
    torch.testing.assert_close(linear8.fallback(*few), linear8.reference(*few))
    monkeypatch.setattr(linear8, "_multiplies_integers", lambda device: False)
    linear8.fallback(*given)
    assert len(asked) == 2

    def refuse(a: Tensor, b: Tensor) -> Tensor:
        raise RuntimeError("not compiled for this platform")

    monkeypatch.setattr(torch, "_int_mm", refuse)
    assert not probe(torch.device("cpu"))


@each
def test_what_is_declined_is_computed_by_the_reference(kernel) -> None:
    """On a CPU all is; the residual stays."""
    before = registry.declined().get(kernel.launch.name, {})
    given = operands(5, 32, 64)
    residual = [torch.ones(5, 32).half()] if kernel is linear8 else []
    y = kernel.launch(*given, *residual)
    assert torch.equal(y, kernel.reference(*given, *residual))
    assert all(bool((each == 1).all()) for each in residual)
    assert registry.declined()[kernel.launch.name] != before


@pytest.fixture(params=[None, "refused", "slower"])
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str | None, list[str]]:
    """What Hopper's kernel says of operands, and what of it was called."""
    found: list[str] = []

    def stand_in(name: str, reference: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*given: Any) -> Tensor:
            found.append(name)
            return reference(*given)

        return run

    refused = "not here" if request.param == "refused" else None
    monkeypatch.setattr(wgmma_gemm8, "accepts", lambda *given, **flags: refused)
    monkeypatch.setattr(wgmma_gemm8, "profitable", lambda x: request.param != "slower")
    monkeypatch.setattr(wgmma_gemm8, "linear", stand_in("linear", linear8.reference))
    monkeypatch.setattr(wgmma_gemm8, "geglu", stand_in("geglu", geglu8.reference))
    return request.param, found


@each
def test_hoppers_kernel_goes_first_if_it_takes_them_and_pays(launched, hopper, kernel) -> None:
    state, called = hopper
    given = operands(9, 32, 64)
    more = (True, "tanh", torch.bfloat16) if kernel is geglu8 else (None, torch.bfloat16)
    given = *given[:4], given[4].bfloat16()
    y = kernel.launch(*given, *more)
    torch.testing.assert_close(y.float(), kernel.reference(*given, *more).float(), atol=1e-3, rtol=1e-2)
    assert called == ([{linear8: "linear", geglu8: "geglu"}[kernel]] if state is None else [])
    assert bool(launched) == bool(state)


def test_why_both_decline(hopper) -> None:
    state, _ = hopper
    if state is not None:
        before = set(registry.declined().get("linear8", {}))
        linear8.launch(*operands(5, 32, 96))
        (reason,) = set(registry.declined()["linear8"]) - before or before
        assert reason.startswith(f"on Hopper: {'not here' if state == 'refused' else registry.SLOWER}; on any card: ")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second tile is measured to be the faster one; each is run twice for that."""
    memory = Memory(None, {})
    for kernel in (linear8, geglu8):
        times = iter([2.0, 1.0])

        def clock(run: choices.Run, times: Any = times) -> float:
            run(), run()
            return next(times)

        made = Choices(kernel.launch.name, clock, lambda: True, lambda device: memory, own=choice8.EXPECTED)
        monkeypatch.setattr(kernel, "_choice", made)


@each
@pytest.mark.parametrize("onto", [False, True])
def test_the_faster_tile_is_chosen(launched, measured, kernel, onto) -> None:
    given = operands(9, 160, 128)
    residual = torch.randn(9, 160).half() if onto and kernel is linear8 else None
    more = [] if residual is None else [residual]

    def run() -> Tensor:
        return kernel.launch(*given, *(each.clone() for each in more))

    target = kernel.reference(*given, *more).float()
    torch.testing.assert_close(run().float(), target, atol=2e-3, rtol=2e-3)
    (first,) = launched
    with choices.measuring(1.0):
        torch.testing.assert_close(run().float(), target, atol=2e-3, rtol=2e-3)
    assert len(set(launched)) == 2
    launched.clear()
    run()
    assert launched != [first] and len(launched) == 1


@each
def test_the_tiles_are_compiled_ahead(monkeypatch, kernel) -> None:
    monkeypatch.setattr(nvrtc.Source, "supported", lambda source, device: True)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (8, 6))
    monkeypatch.setattr(mma_gemm8, "multiprocessors", lambda device: 28)
    found: list[dict[str, int]] = []
    monkeypatch.setattr(mma_gemm8, "launch_kernel", lambda source, grid, *args, **given: found.append(given))
    given = [each.to("meta") for each in operands()]
    residual = [torch.empty(70, 320, dtype=HALF, device="meta")] if kernel is linear8 else []
    with triton_runtime.dry_run(GPU):
        y = kernel.launch(*given, *residual)
    assert y.shape == (70, 320 if kernel is linear8 else 160) and len(found) == 2 and found[0] != found[1]
    assert {each["EPILOGUE"] for each in found} == {1 if kernel is linear8 else 2}


@pytest.mark.parametrize("place", ["positional", "keyword", "none", "absent"])
def test_memory_is_counted_once_if_the_result_takes_the_residuals(place: str) -> None:
    graph = fx.Graph()
    names = "x", "x_scale", "weight", "weight_scale", "bias"
    inputs = [graph.placeholder(name) for name in names]
    given = graph.placeholder("given")
    residual = graph.call_function(torch.neg, (given,))
    positional = {"positional": (residual,), "none": (None,)}.get(place, ())
    keywords = {"residual": residual} if place == "keyword" else {}
    node = graph.call_function(linear8.launch, (*inputs, *positional), keywords)
    graph.output((node, *([residual] if place in ("none", "absent") else [])))
    for each in (given, residual, node):
        each.meta["val"] = torch.empty(512, 512, dtype=HALF, device="meta")
    one = 2 * 512 * 512
    assert graph_memory.peak_bytes(graph) == (one if place in ("positional", "keyword") else 2 * one)
