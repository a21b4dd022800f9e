from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sfast_ext.kernels.backend import cuda_driver, nvrtc, triton_runtime
from sfast_ext.kernels.eight_bits import gain
from sfast_ext.kernels.eight_bits.gain import Product

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
H200 = (9, 0), "NVIDIA H200", 132, 1.98, 4917
A100 = (8, 0), "NVIDIA A100-SXM4-80GB", 108, 1.41, 2039
RTX_2080_TI = (7, 5), "NVIDIA GeForce RTX 2080 Ti", 68, 1.545, 616
GTX_1660 = (7, 5), "NVIDIA GeForce GTX 1660 SUPER", 22, 1.785, 336
TITAN_RTX = (7, 5), "NVIDIA TITAN RTX", 72, 1.77, 672
T4 = (7, 5), "Tesla T4", 40, 1.59, 320
RTX_3060 = (8, 6), "NVIDIA GeForce RTX 3060", 28, 1.777, 360
A10 = (8, 6), "NVIDIA A10", 72, 1.695, 600
RTX_4090 = (8, 9), "NVIDIA GeForce RTX 4090", 128, 2.52, 1008
L4 = (8, 9), "NVIDIA L4", 58, 2.04, 300
RTX_5090 = (12, 0), "NVIDIA GeForce RTX 5090", 170, 2.407, 1792
B200 = (10, 0), "NVIDIA B200", 148, 1.965, 8000
B300 = (10, 3), "NVIDIA B300", 148, 1.92, 8000
THOR = (11, 0), "NVIDIA Thor", 20, 1.575, 273
V100 = (7, 0), "Tesla V100", 80, 1.53, 900


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the GPU one of these cards."""

    def become(card: Any, fused_norms: bool | None = None) -> None:
        capability, name, count, clock, bandwidth = card
        told = {
            cuda_driver.CU_DEVICE_ATTRIBUTE_CLOCK_RATE: int(1e6 * clock),
            cuda_driver.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: 1000 * bandwidth,
            cuda_driver.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: 4000,
        }
        driver = SimpleNamespace(cuDeviceGetAttribute=lambda attribute, index: told[attribute])
        monkeypatch.setattr(nvrtc, "loaded_driver", lambda: driver)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name=name))
        monkeypatch.setattr(triton_runtime, "capability", lambda device: capability)
        monkeypatch.setattr(gain, "multiprocessors", lambda device: count)
        fused = capability == (9, 0) if fused_norms is None else fused_norms
        kernel = SimpleNamespace(supported=lambda device, triton: fused)
        monkeypatch.setattr(gain.linear_layer_norm, "launch", kernel)
        gain._published.cache_clear()

    yield become
    gain._published.cache_clear()


@pytest.mark.parametrize(
    ("card", "tflops", "ratio"),
    [
        (H200, 1070, 2), (A100, 312, 2), (RTX_2080_TI, 53.8, 4), (TITAN_RTX, 130, 2), (T4, 65, 2), (RTX_3060, 25.5, 4),
        (A10, 125, 2), (RTX_4090, 165.2, 4), (L4, 121, 2), (RTX_5090, 209.5, 4),
    ],
)  # fmt: skip
def test_rates_are_the_published_ones(on: Any, card: Any, tflops: float, ratio: int) -> None:
    on(card)
    found = gain.rates(GPU)
    assert found is not None
    assert found.half * 2e-6 == pytest.approx(tflops, rel=0.01) and found.eight == ratio * found.half
    assert found.bandwidth == pytest.approx(1e3 * card[4])


@pytest.mark.parametrize("card", [B200, B300, THOR, V100, GTX_1660])
def test_cards_whose_products_in_half_precision_are_as_fast(on: Any, card: Any) -> None:
    on(card)
    assert gain.rates(GPU) is None
    assert gain.pays([Product(8192, 5120, 1280)] * 2, True, GPU) == [False, False]


@pytest.mark.parametrize(
    ("card", "rows", "columns", "depth", "by_norm", "pays"),
    [
        # of SDXL at 1024x1024: packed queries, those for the prompt, what follows an attention, GEGLU and back
        (H200, 2048, 3840, 1280, True, True),
        (H200, 2048, 1280, 1280, True, False),
        (H200, 2048, 1280, 1280, False, False),
        (H200, 2048, 10240, 1280, True, True),
        (H200, 2048, 1280, 5120, False, True),
        (H200, 8192, 1280, 1280, False, True),  # four images
        (A100, 2048, 1280, 1280, False, True),
        (RTX_3060, 2048, 1280, 1280, False, True),
        (RTX_4090, 2048, 1280, 1280, False, True),
        # of SD 1.5 at 512x512
        (H200, 8192, 320, 1280, False, False),
        (H200, 512, 1280, 5120, False, False),
        (A100, 8192, 320, 320, False, False),
        (RTX_3060, 8192, 320, 320, True, True),
        (RTX_3060, 512, 1280, 1280, True, True),
        (RTX_4090, 512, 1280, 1280, False, True),
        (T4, 512, 1280, 1280, False, False),
    ],
)  # fmt: skip
def test_products_that_pay(
    on: Any, card: Any, rows: int, columns: int, depth: int, by_norm: bool, pays: bool
) -> None:
    on(card)
    assert gain.pays([Product(rows, columns, depth)], by_norm, GPU) == [pays]
    assert gain.pays([Product(rows, columns, depth)], by_norm, CPU) == [True]


def test_products_of_one_input_share_what_it_costs(on: Any) -> None:
    on(H200)
    one = Product(2048, 1280, 1280)
    assert gain.pays([one], False, GPU) == [False]
    assert gain.pays([one] * 3, False, GPU) == [True] * 3
    # the weight of the last takes longer to be read than it saves
    assert gain.pays([one, one, one, Product(64, 1280, 1280)], False, GPU) == [True, True, True, False]


@pytest.mark.parametrize(("fused", "pays"), [(0.0, True), (4.0, True), (9.0, False), (40.0, False)])
def test_a_product_that_could_be_one_kernel_with_what_follows_must_save_that_too(
    on: Any, fused: float, pays: bool
) -> None:
    on(H200)
    # it saves 16.1 us, and its input costs 9.8 with the margin
    assert gain.pays([Product(8192, 1280, 1280, fused)], False, GPU) == [pays]


def test_a_norm_quantises_for_nothing_unless_it_would_be_one_kernel_with_a_product(on: Any) -> None:
    product = [Product(2048, 1280, 1280)]
    for fused in (True, False):
        on(H200, fused)
        assert gain.pays(product, True, GPU) == [not fused]
        assert gain.pays(product, False, GPU) == [False]


@pytest.mark.parametrize("told", [{}, None])
def test_a_card_that_does_not_say_how_fast_it_is(on: Any, monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    on(RTX_3060)

    def unavailable() -> Any:
        if told is None:
            raise cuda_driver.Unavailable("there is none")
        return SimpleNamespace(cuDeviceGetAttribute=lambda attribute, index: 0)

    monkeypatch.setattr(nvrtc, "loaded_driver", unavailable)
    found = gain.rates(GPU)
    assert found is not None and found.half == 1500 * 28 * 256 and found.bandwidth == 300_000


@pytest.mark.parametrize(
    ("channels", "size", "columns", "faster"),
    [(320, 128, 320, True), (2560, 32, 1280, True), (320, 64, 320, True), (1280, 16, 1280, False)],
)
def test_convolutions_on_hopper(on, channels, size, columns, faster):
    """As measured: reading the weight and what the norm takes longer can exceed what a small one saves."""
    on(H200)
    assert gain.convolution_pays(Product(2 * size * size, columns, 9 * channels), GPU) == faster
    on(B200)
    assert not gain.convolution_pays(Product(2 * size * size, columns, 9 * channels), GPU)


def test_attentions_that_pay(on: Any) -> None:
    """Those of SDXL, 1024x1024, two images; not those of a small image, nor of cards without a gain."""
    many, some = (20, 4096, 4096, 64), (40, 1024, 1024, 64)
    for card in (RTX_2080_TI, RTX_3060, RTX_4090, TITAN_RTX, A10, RTX_5090):
        on(card)
        assert gain.attention_pays(*many, GPU), card
    on(RTX_3060)
    assert gain.attention_pays(*some, GPU) and not gain.attention_pays(16, 256, 256, 40, GPU)
    for card in (H200, A100, GTX_1660, V100, B200):
        on(card)
        assert not gain.attention_pays(*many, GPU), card
    assert gain.attention_pays(1, 200, 200, 40, CPU)
