"""Images of more elements than 32 bits count, as a VAE's are at 4096x4096: which kernels would be launched, without
memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.compile_table import launches
from sfast_ext.kernels.backend import nvrtc, triton_runtime
from sfast_ext.kernels.backend.cuda_libraries import Bindings
from sfast_ext.kernels.conv import conv2d, narrow_conv, upsample
from sfast_ext.kernels.group_norm import add_group_norm, group_norm, portable
from sfast_ext.kernels.pointwise import bias_add

GPU, META = torch.device("cuda", 0), torch.device("meta")
HALF = torch.float16


def image(channels: int, side: int, images: int = 1, dtype: torch.dtype = HALF) -> Tensor:
    size = (images, channels, side, side)
    return torch.empty(size, dtype=dtype, device=META).to(memory_format=torch.channels_last)


def vector(size: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(size, dtype=dtype, device=META)


@pytest.fixture(autouse=True)
def without_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NVRTC and a driver, as far as a choice can tell. Offsets in Triton's kernels are 64-bit."""
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(object(), object()))
    with triton_runtime.without_triton():
        yield


def chosen(kernel: Any, *args: Any, capability: int = 80) -> list[str]:
    """The kernels in CUDA C++ that would be launched."""
    with launches._card(capability), triton_runtime.dry_run(GPU) as recorded:
        kernel.launch(*args)
    return [source.name for source, *_ in recorded]


def normed(x: Tensor) -> tuple[Any, ...]:
    return x, 32, vector(x.shape[1]), vector(x.shape[1]), 1e-6


@pytest.mark.parametrize(("side", "launched"), [(2048, True), (4088, True), (4096, False)])
def test_a_group_norm_counts_the_elements_of_an_image_in_32_bits(side: int, launched: bool) -> None:
    two = ["group_norm_statistics", "group_norm_normalise"]
    assert chosen(group_norm, *normed(image(256, side))) == (two if launched else [])


def test_several_images_are_counted_one_by_one() -> None:
    assert len(chosen(group_norm, *normed(image(256, 2048, images=8)))) == 2


@pytest.mark.parametrize(("side", "launched"), [(2048, True), (4096, False)])
def test_one_that_adds_first(side: int, launched: bool) -> None:
    x = image(256, side)
    args = (x, vector(256), x, 1.0, 32, vector(256), vector(256), 1e-6, True)
    assert ("group_norm_statistics" in chosen(add_group_norm, *args)) == launched


@pytest.mark.parametrize(("channels", "side", "launched"), [(256, 4088, True), (256, 4096, False), (3, 8192, True)])
def test_a_sum_counts_all_elements_in_32_bits(channels: int, side: int, launched: bool) -> None:
    x = image(channels, side)
    assert chosen(bias_add, x, vector(channels), x) == ["bias_add"] * launched


@pytest.mark.parametrize(("images", "launched"), [(1, True), (127, True), (128, False)])
def test_the_first_convolution_counts_pixels_in_32_bits(images: int, launched: bool) -> None:
    x = image(4, 4096, images)
    weight = image(4, 3, 128)
    assert chosen(narrow_conv, x, weight, vector(128)) == ["narrow_conv_in"] * launched


@pytest.mark.parametrize(("images", "launched"), [(1, True), (127, True), (128, False)])
def test_a_convolution_on_hopper_counts_pixels_in_32_bits(images: int, launched: bool) -> None:
    x = image(256, 4096, images)
    with launches._card(90), triton_runtime.dry_run(GPU):
        assert (conv2d.accepts(x, image(256, 3, 256)) is None) == launched


def test_an_upsampling_counts_a_line_at_a_time() -> None:
    assert chosen(upsample, image(256, 2048, 3), (4096, 4096), (0.5, 0.5)) == ["upsample"]


@pytest.mark.parametrize(
    ("pixels", "channels", "fits"),
    [(4096**2, 255, True), (4096**2, 256, False), (2**30 - 1, 1, True), (2**30, 1, False)],
)
def test_what_32_bits_address(pixels: int, channels: int, fits: bool) -> None:
    assert portable.accepts_size(pixels, channels) == fits
