"""Kernels for Hopper if there is no Triton: chosen there, on no other card and in no other precision, and right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.compile_table import launches
from kernels.support import TOLERANCE, half_dtype, heads, randn
from sfast_ext import kernels
from sfast_ext.kernels.attention import attention, query_attention
from sfast_ext.kernels.backend import health, nvrtc, triton_runtime
from sfast_ext.kernels.backend.cuda_libraries import Bindings
from sfast_ext.kernels.conv import conv2d
from sfast_ext.kernels.eight_bits import conv2d8, geglu8, linear8, quantise_weights
from sfast_ext.kernels.group_norm import conv_group_norm
from sfast_ext.kernels.linear import linear_geglu, linear_layer_norm

GPU, CUDA, META = torch.device("cuda", 0), torch.device("cuda"), torch.device("meta")

pytestmark = pytest.mark.skipif(kernels.interpreted(), reason="the interpreter is Triton's")


class Case(NamedTuple):
    kernel: Any
    operands: Callable[[torch.dtype, torch.device], tuple[Any, ...]]
    launched: tuple[str, ...]
    """The sources, in the order of their launches."""


def image(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    return randn(*shape, dtype=dtype, device=device).to(memory_format=torch.channels_last)


def filters(dtype: torch.dtype, device: torch.device, columns: int, channels: int) -> Tensor:
    return image(dtype, device, columns, channels, 3, 3) * (9 * channels) ** -0.5


def matrix(dtype: torch.dtype, device: torch.device, rows: int, columns: int) -> Tensor:
    return randn(rows, columns, dtype=dtype, device=device, std=columns**-0.5)


def vectors(dtype: torch.dtype, device: torch.device, count: int, size: int) -> list[Tensor]:
    return [randn(size, dtype=dtype, device=device) for _ in range(count)]


def normed(added: bool) -> Callable[[torch.dtype, torch.device], tuple[Any, ...]]:
    def operands(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        residual = image(dtype, device, 2, 320, 64, 64) if added else None
        shift = randn(*((320,) if added else (2, 320)), dtype=dtype, device=device)
        x, weight = image(dtype, device, 2, 320, 64, 64), filters(dtype, device, 320, 320)
        return x, weight, shift, residual, 32, *vectors(dtype, device, 2, 320), 1e-5, True

    return operands


def summed(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    x, residual = (randn(2048, 1280, dtype=dtype, device=device) for _ in range(2))
    bias, *norm = vectors(dtype, device, 3, 1280)
    return x, matrix(dtype, device, 1280, 1280), bias, residual, *norm, 1e-5


def prompted(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    _, k, v = heads((2, 20, 1024, 77, 64), dtype, device)
    return randn(2, 1024, 1280, dtype=dtype, device=device), matrix(dtype, device, 1280, 1280), k, v


def of_8_bits(geglu: bool) -> Callable[[torch.dtype, torch.device], tuple[Any, ...]]:
    def operands(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        wide = [randn(n, 1280, dtype=torch.float32, device=device, std=40.0) for n in (2048, 2560)]
        x, weight = (each.clamp(-127, 127).to(torch.int8) for each in wide)
        x_scale, weight_scale = (torch.full((n,), 0.004, device=device) for n in (2048, 2560))
        (bias,) = vectors(dtype, device, 1, 2560)
        return x, x_scale, weight, weight_scale, bias, *((False, "none") if geglu else (None,)), dtype

    return operands


def images_of_8_bits(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    wide = image(torch.float32, device, 2, 640, 64, 64), matrix(torch.float32, device, 640, 9 * 640)
    x, weight = ((each * each.new_tensor(scale)).to(torch.int8) for each, scale in zip(wide, (40.0, 3000.0)))
    x_scale, weight_scale = (torch.full((n,), scale, device=device) for n, scale in ((2, 0.025), (640, 3e-4)))
    x_scale = torch.stack([x_scale, x_scale.new_tensor([-127.0, -3.0])])
    weight_scale = torch.stack([weight_scale, *quantise_weights.sums_of_codes(weight)])
    residual = image(dtype, device, 2, 640, 64, 64)
    return x, x_scale, weight, weight_scale, *vectors(dtype, device, 1, 640), residual, 1, dtype


BOTH = "conv2d", "group_norm_normalise"
EIGHT_BITS = linear8, geglu8, conv2d8
CASES = {
    "conv2d": Case(conv2d, lambda *to: (image(*to, 2, 640, 64, 64), filters(*to, 640, 640)), ("conv2d",)),
    "conv_group_norm": Case(conv_group_norm, normed(False), BOTH),
    "conv_group_norm of a sum": Case(conv_group_norm, normed(True), BOTH),
    "linear_geglu": Case(
        linear_geglu,
        lambda dtype, device: (
            randn(2, 1024, 1280, dtype=dtype, device=device),
            matrix(dtype, device, 10240, 1280),
            *vectors(dtype, device, 1, 10240),
        ),
        ("linear_geglu",),
    ),
    "linear_layer_norm": Case(linear_layer_norm, summed, ("linear_layer_norm",)),
    "linear8": Case(linear8, of_8_bits(False), ("wgmma_gemm8",)),
    "geglu8": Case(geglu8, of_8_bits(True), ("wgmma_gemm8",)),
    "conv2d8": Case(conv2d8, images_of_8_bits, ("wgmma_conv8",)),
    "query_attention": Case(query_attention, prompted, ("query_attention",)),
    **{
        f"flash_attention {size}": Case(
            attention, lambda *to, size=size: tuple(heads((2, 8, 4096, 4096, size), *to)), ("flash_attention",)
        )
        for size in (40, 64, 80)
    },
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
FOR_HOPPER = {s for k in kernels.registered().values() for s in k.cuda_sources if s.hopper}


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC and a driver, as far as a choice can tell."""
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(object(), object()))


@pytest.fixture(params=["off", "not installed"])
def no_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, bound: None) -> Iterator[None]:
    if request.param == "not installed":
        monkeypatch.setattr(triton_runtime, "AVAILABLE", False)
    with triton_runtime.without_triton() if request.param == "off" else contextlib.nullcontext():
        yield


def chosen(case: Case, capability: int, dtype: torch.dtype = torch.float16) -> list[tuple[Any, dict[str, Any]]]:
    """What would be launched on a card, with the constants."""
    given = case.operands(dtype, META)
    with launches._card(capability), triton_runtime.dry_run(GPU) as recorded:
        case.kernel.launch(*given)
    return [(kernel, constants) for kernel, _, constants, _ in recorded]


def test_every_source_for_hopper_has_a_case() -> None:
    assert {name for case in CASES.values() for name in case.launched} == {s.name for s in FOR_HOPPER} | {BOTH[1]}


@half_dtype
@each_case
def test_it_is_chosen_on_hopper(no_triton: None, case: Case, dtype: torch.dtype) -> None:
    assert tuple(kernel.name for kernel, _ in chosen(case, 90, dtype)) == case.launched


@each_case
def test_as_it_is_with_triton(bound: None, case: Case) -> None:
    with_triton = chosen(case, 90)
    with triton_runtime.without_triton():
        without = chosen(case, 90)
    assert [each for each in with_triton if each[0] in FOR_HOPPER] == [
        each for each in without if each[0] in FOR_HOPPER
    ]
    assert len(with_triton) == len(without) == len(case.launched)


@pytest.mark.parametrize("capability", [75, 89, 100, 120])
@each_case
def test_on_no_other_card(no_triton: None, case: Case, capability: int) -> None:
    assert FOR_HOPPER.isdisjoint(kernel for kernel, _ in chosen(case, capability))


@each_case
def test_in_no_other_precision(no_triton: None, case: Case) -> None:
    found = [kernel for kernel, _ in chosen(case, 90, torch.float32)]
    assert FOR_HOPPER.isdisjoint(found) and all(isinstance(kernel, nvrtc.Source) for kernel in found)


@each_case
def test_not_without_nvrtc(no_triton: None, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(object(), None))
    assert not chosen(case, 90)


@each_case
def test_plans_have_it_if_it_is_chosen(bound: None, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def served(capability: int) -> bool:
        with launches._card(capability):
            return case.kernel.launch.supported(GPU, triton=False)

    # GEGLU's product has another kernel on GeForce and A100, products of 8 bits on every card; attention is the
    # library's if ours is not supported
    library, any_card = case.kernel is attention, case.kernel in EIGHT_BITS
    assert served(90) and served(89) == served(80) == (library or any_card or case.kernel is linear_geglu)
    assert served(100) == (library or any_card)
    monkeypatch.setattr(health, "_disabled", {})
    health.disable(case.kernel.launch.name, GPU, "it failed")
    assert not served(90)
    health.clear()
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(None, None))
    assert served(90) == library


def test_few_keys(no_triton: None) -> None:
    """The kernel for them is Triton's; the one for any card is left."""
    few = Case(attention, lambda *to: tuple(heads((2, 8, 4096, 77, 40), *to)), ())
    assert [kernel.name for kernel, _ in chosen(few, 90)] == ["mma_attention"]


def test_boxes_that_differ_are_left_to_a_norm_of_its_own(no_triton: None) -> None:
    def operands(*to: Any) -> tuple[Any, ...]:
        return (image(*to, 1, 64, 65, 113), filters(*to, 320, 64), None, None, 32, *vectors(*to, 2, 320), 1e-5)

    found = [kernel.name for kernel, _ in chosen(Case(conv_group_norm, operands, ()), 90)]
    assert found == ["conv2d", "group_norm_statistics", "group_norm_normalise"]


def test_what_is_not_plain(no_triton: None) -> None:
    x, weight, bias = CASES["linear_geglu"].operands(torch.float16, META)
    with launches._card(90):
        with triton_runtime.dry_run(GPU):
            assert linear_geglu.accepts(x, weight, bias) is None
            assert linear_geglu.accepts(x, weight.bfloat16(), bias)
            assert linear_geglu.accepts(x, weight, bias.float())
            assert linear_geglu.accepts(x.double(), weight.double(), None)
        assert linear_geglu.accepts(x, weight, bias)  # outside of a dry run they are on no GPU
    ones = torch.ones(2)
    assert triton_runtime.accepts_tensors(ones, None, torch.nn.Parameter(ones), ones.half()) is None
    assert triton_runtime.accepts_tensors(ones, torch.ones(2, device=META))
    assert triton_runtime.accepts_tensors(ones.as_subclass(Other), ones)
    assert triton_runtime.accepts_tensors(ones, ones.double())


class Other(Tensor):
    pass


def hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")


@pytest.mark.gpu
@half_dtype
@each_case
def test_it_computes_its_reference(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    hopper()
    launched: list[str] = []
    honest = nvrtc.Source._launch

    def launch(source: nvrtc.Source, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        launched.append(source.name)
        honest(source, grid, *args, **constants)

    monkeypatch.setattr(nvrtc.Source, "_launch", launch)
    given = case.operands(dtype, CUDA)
    with triton_runtime.without_triton():
        results, again = case.kernel.launch(*given), case.kernel.launch(*given)
    assert tuple(launched) == 2 * case.launched
    targets = case.kernel.reference(*(x.double() if isinstance(x, Tensor) else x for x in given))
    if isinstance(results, Tensor):
        results, again, targets = (results,), (again,), (targets,)
    for result, repeated, target in zip(results, again, targets, strict=True):
        if target is None:
            assert result is None
            continue
        assert result.shape == target.shape and result.dtype == dtype and torch.equal(result, repeated)
        assert (result.double() - target).norm() <= 2 * TOLERANCE[dtype][0] * target.norm()


@pytest.mark.gpu
@each_case
def test_full_precision_is_left_to_others(case: Case) -> None:
    hopper()
    given = case.operands(torch.float32, CUDA)
    with triton_runtime.without_triton(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        results = case.kernel.launch(*given)
    targets = case.kernel.reference(*(x.double() if isinstance(x, Tensor) else x for x in given))
    if isinstance(results, Tensor):
        results, targets = (results,), (targets,)
    for result, target in zip(results, targets, strict=True):
        assert target is None or (result.double() - target).norm() <= 1e-4 * target.norm()
