"""The norm of a convolution's result without Triton: by the statistics of the convolution's boxes, on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import cuda_on_cpu
from kernels.support import close, half_dtype, randn
from sfast_ext import kernels
from sfast_ext.kernels.backend import nvrtc, triton_runtime
from sfast_ext.kernels.conv import conv2d
from sfast_ext.kernels.group_norm import add_group_norm, conv_group_norm, group_norm, portable
from sfast_ext.kernels.group_norm.two_pass import Parts

CPU = torch.device("cpu")
WIDE, HIGH = 4, 2  # pixels of a box

pytestmark = pytest.mark.skipif(kernels.interpreted(), reason="the interpreter is Triton's")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched, on the CPU; the convolution's is stood in for, whose result is the
    residual."""
    found: list[str] = []

    def launch(source, grid, *args, **constants):
        found.append(source.name)
        cuda_on_cpu.launch(source, grid, *args, **constants)

    def with_statistics(x: Tensor, weight: Tensor, groups: int, shift: None, residual: Tensor) -> tuple[Tensor, Tensor]:
        found.append("conv2d")
        tall = residual.unfold(2, HIGH, HIGH).unfold(3, WIDE, WIDE).double()
        boxes = tall.unflatten(1, (groups, -1)).permute(0, 3, 4, 1, 2, 5, 6).flatten(4).flatten(1, 2)
        means, deviations = boxes.mean(3), boxes.var(3, correction=0) * boxes.shape[3]
        return residual, torch.stack([means, deviations]).float()

    monkeypatch.setattr(nvrtc.Source, "_launch", launch)
    monkeypatch.setattr(nvrtc.Source, "supported", lambda source, device: source.name != "conv2d")
    monkeypatch.setattr(conv2d, "with_statistics", with_statistics)
    monkeypatch.setattr(conv2d, "accepts_statistics", lambda *args: None)
    monkeypatch.setattr(
        conv2d, "boxes_of_image", lambda x: (-(-x.shape[3] // WIDE), -(-x.shape[2] // HIGH), WIDE, HIGH)
    )
    # small blocks, as each thread of the GPU is one of the CPU
    monkeypatch.setattr(portable, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(portable, "_THREADS", 96)
    monkeypatch.setattr(portable, "whole", lambda *args: None)
    return found


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor | None | int | float, ...]:
    """Means differ between pixels and between groups."""
    images, columns, groups, height, width = shape
    slope = torch.arange(height * width).reshape(height, width) * (4 / (height * width))
    total = torch.randn(images, columns, height, width) + slope + torch.arange(columns)[:, None, None] * (3 / columns)
    total = total.to(dtype).to(memory_format=torch.channels_last)
    x, conv = torch.zeros(images, 64, height, width, dtype=dtype), torch.zeros(columns, 64, 3, 3, dtype=dtype)
    return x, conv, None, total, groups, *(randn(columns, dtype=dtype, device=CPU) for _ in range(2)), 1e-5


@half_dtype
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 320, 32, 4, 12), (1, 96, 4, 18, 20), (2, 640, 32, 2, 4), (3, 60, 2, 6, 8)], ids=str
)
def test_the_norm_is_that_of_the_sum(
    launched: list[str], shape: tuple[int, ...], silu: bool, dtype: torch.dtype
) -> None:
    given = operands(shape, dtype)
    with triton_runtime.without_triton():
        total, y = conv_group_norm.launch(*given, silu)
    assert launched == ["conv2d", "group_norm_normalise"] and total is given[3]
    assert y.is_contiguous(memory_format=torch.channels_last) and y.dtype == dtype
    close(y, group_norm.reference(total.double(), *given[4:], None, silu), scale=4)


def test_a_result_of_another_type_and_no_weights(launched: list[str]) -> None:
    x, conv, shift, residual, groups, _, _, eps = operands((2, 320, 32, 4, 12), torch.float16)
    with triton_runtime.without_triton():
        total, y = conv_group_norm.launch(x, conv, shift, residual, groups, None, None, eps, out_dtype=torch.float32)
    assert launched == ["conv2d", "group_norm_normalise"] and y.dtype == torch.float32
    close(y, group_norm.reference(total.double(), groups, None, None, eps), scale=4)


@pytest.mark.parametrize("what", ["rows", "columns", "a weight of another type", "many parts"])
def test_what_is_left_to_two_kernels(launched: list[str], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = list(operands((1, 320, 32, 5 if what == "rows" else 4, 11 if what == "columns" else 12), torch.bfloat16))
    if what == "a weight of another type":
        given[5] = given[5].float()
    if what == "many parts":
        monkeypatch.setattr(portable, "MAX_PARTS", 5)
    with triton_runtime.without_triton():
        assert conv_group_norm.accepts(*given[:7], torch.bfloat16)
        results = conv_group_norm.launch(*given)
        wanted = add_group_norm.launch(torch.zeros_like(given[3]), None, given[3], 1.0, *given[4:])
    assert "conv2d" not in launched and all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


def test_parts_by_which_a_norm_is_computed() -> None:
    def pixels(*parts: int, images: int = 2, columns: int = 320) -> int | None:
        return portable.pixels_of_part(Parts(*parts), images, columns, 32, torch.float16)

    assert pixels(1, 32, 64, 2, 64, 64) == 128 and pixels(2, 64, 64, 2, 128, 128) == 128
    assert pixels(2, 65, 64, 2, 130, 128) is None  # more than a block reads
    assert pixels(1, 33, 64, 2, 65, 64) is None and pixels(2, 32, 64, 2, 64, 65) is None
    assert pixels(1, 2, 16, 8, 16, 16) is None  # one launch
    assert (
        pixels(1, 32, 64, 2, 64, 64, images=1 << 16) is None and pixels(1, 32, 64, 2, 64, 64, columns=1 << 20) is None
    )


def test_all_sources_are_needed_in_place_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for missing in (None, "conv2d", "group_norm_normalise"):
        monkeypatch.setattr(nvrtc.Source, "supported", lambda source, device, name=missing: source.name != name)
        assert conv_group_norm.launch.supported(gpu, triton=False) == (missing is None)
        assert conv_group_norm.launch.supported(gpu, triton=True)
