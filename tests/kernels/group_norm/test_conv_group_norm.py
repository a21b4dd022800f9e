from __future__ import annotations

import pytest
import torch
from torch import fx

from kernels.support import close, each_dtype, few_parts, half_dtype, randn, wide
from sfast_ext import kernels
from sfast_ext.kernels.backend import nvrtc, precompile, triton_runtime
from sfast_ext.kernels.backend.cuda_libraries import Bindings
from sfast_ext.kernels.conv import conv2d
from sfast_ext.kernels.group_norm import add_group_norm, conv_group_norm, group_norm, two_pass

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NHWC = torch.channels_last
# images, channels, height, width, channels of the result; such that the quickest tile takes statistics
SIZES = [(2, 320, 64, 64, 320), (2, 640, 64, 64, 640), (2, 64, 128, 128, 320), (2, 128, 32, 32, 1280)]
SIZES += [(1, 64, 65, 113, 320), (3, 64, 50, 70, 640), (2, 64, 63, 40, 1280), (5, 64, 64, 64, 320)]
SIZES += [(7, 64, 31, 47, 640), (2, 64, 192, 192, 320)]


def operands(size, dtype, device, shifted=True, added=True):
    """Such that the sums are of the size of one, but groups have means of their own."""
    images, channels, height, width, columns = size
    x = randn(images, channels, height, width, dtype=dtype, device=device).to(memory_format=NHWC)
    conv = randn(columns, channels, 3, 3, dtype=dtype, device=device, std=(9 * channels) ** -0.5)
    shape = (columns,) if added else (images, columns)
    shift = randn(*shape, dtype=dtype, device=device) + 2 if shifted else None
    residual = randn(images, columns, height, width, dtype=dtype, device=device).to(memory_format=NHWC)
    norm = (randn(columns, dtype=dtype, device=device), randn(columns, dtype=dtype, device=device), 1e-5)
    return x, conv.to(memory_format=NHWC), shift, residual if added else None, 32, *norm


def target(*args, **options):
    args = tuple(t.double() if isinstance(t, torch.Tensor) else t for t in args)
    return conv_group_norm.reference(*args, silu=options.get("silu", False))


def right(results, args, **options):
    """The sum by one rounding; the norm as that of the sum that was rounded."""
    (total, y), (wanted, normed) = results, target(*args, **options)
    assert options.get("out_dtype") in (None, y.dtype)
    epsilon = torch.finfo(args[0].dtype).eps
    if wanted is None:
        assert total is None
        assert (wide(y) - normed.cpu()).norm() <= 0.6 * epsilon * normed.norm()
    else:
        torch.testing.assert_close(wide(total), wanted.cpu(), rtol=1.05 * epsilon / 2, atol=1e-4)
        assert total.is_contiguous(memory_format=NHWC)
        normed = group_norm.reference(total.double(), *args[4:], None, options.get("silu", False))
        close(y, normed.cpu(), scale=4)
    assert y.is_contiguous(memory_format=NHWC)


def alike(results, args):
    """As right as kernels are that round between them."""
    for result, wanted in zip(results, target(*args)):
        assert (wide(result) - wanted.cpu()).norm() <= 2e-3 * wanted.norm()


@pytest.fixture
def fused(monkeypatch):
    """A failure if the two kernels run that the one stands for."""
    monkeypatch.setattr(conv2d, "launch", None)


@pytest.mark.gpu
@half_dtype
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(fused, size, dtype):
    args = operands(size, dtype, CUDA)
    first = conv_group_norm.launch(*args, silu=True)
    right(first, args, silu=True)
    assert all(torch.equal(a, b) for a, b in zip(first, conv_group_norm.launch(*args, silu=True)))


@pytest.mark.gpu
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_what_is_added(fused, shifted, added):
    args = operands(SIZES[4], torch.float16, CUDA, shifted, added)
    right(conv_group_norm.launch(*args), args)
    args = (*args[:5], None, None, 1e-6)
    right(conv_group_norm.launch(*args, out_dtype=torch.float32), args, out_dtype=torch.float32)


@pytest.mark.gpu
def test_a_shift_that_is_a_slice(fused):
    args = list(operands(SIZES[5], torch.float16, CUDA, added=False))
    of_many = randn(3, 1280, dtype=torch.float16, device=CUDA)
    for args[2] in (of_many[:, 320:960], of_many[:1, :640].expand(3, 640)):
        right(conv_group_norm.launch(*args), args)


@pytest.mark.gpu
def test_a_large_mean_costs_no_digits(fused):
    x, conv, shift, residual, *norm = operands((2, 64, 65, 113, 320), torch.float16, CUDA)
    # of the steps of 1 that numbers near 1500 are rounded to, all know
    args = x, conv, None, residual * 4 + 1500, *norm
    right(conv_group_norm.launch(*args), args)


@pytest.mark.gpu
def test_nan_stays_in_its_group_and_image(fused):
    x, conv, shift, residual, *norm = operands((2, 64, 65, 113, 320), torch.float16, CUDA)
    total, y = conv_group_norm.launch(x, conv, shift, residual, *norm)
    residual[1, 37, 60, 100] = float("nan")  # group 3
    spoilt, normed = conv_group_norm.launch(x, conv, shift, residual, *norm)
    assert spoilt.isnan().sum() == 1 and spoilt[1, 37, 60, 100].isnan()
    assert normed[1, 30:40].isnan().all()
    normed[1, 30:40] = y[1, 30:40]
    assert torch.equal(normed, y)


@pytest.mark.gpu
def test_what_the_kernel_does_not_take():
    half = torch.float16
    sizes = [((2, 64, 9, 9, 320), half), ((2, 60, 64, 64, 320), half), ((2, 64, 64, 64, 320), torch.float32)]
    for size, dtype in sizes:
        args = operands(size, dtype, CUDA)
        assert conv_group_norm.accepts(*args[:7], dtype)
        alike(conv_group_norm.launch(*args), args)
    args = list(operands(SIZES[0], half, CUDA))
    for place, other in ((3, args[3].contiguous()), (2, args[2].float()), (2, args[2].expand(2, 320)), (3, None)):
        changed = [*args[:place], other, *args[place + 1 :]]
        assert conv_group_norm.accepts(*changed[:7], half)


@pytest.mark.gpu
def test_without_the_kernel(monkeypatch):
    def unavailable(*args, **kwargs):
        raise nvrtc.Unavailable("no")

    args = operands(SIZES[0], torch.float16, CUDA)
    monkeypatch.setattr(conv2d, "_launch", unavailable)
    alike(conv_group_norm.launch(*args), args)


def test_on_a_cpu_the_kernels_follow_each_other():
    for added in (False, True):
        args = operands((2, 64, 9, 7, 320), torch.float32, CPU, added=added)
        x, conv, shift, residual, *norm = args
        total, y = conv_group_norm.launch(*args, silu=True)
        image = conv2d.fallback(x, conv)
        if added:
            wanted = add_group_norm.launch(image, shift, residual, 1.0, *norm, True)
            assert torch.equal(total, wanted[0]) and torch.equal(y, wanted[1])
        else:
            assert total is None
            assert torch.equal(y, group_norm.launch(image, *norm, shift, True))


def test_the_reference_is_what_it_stands_for():
    args = operands((2, 64, 9, 7, 320), torch.float64, CPU)
    total, y = conv_group_norm.reference(*args, silu=True)
    summed = torch.nn.functional.conv2d(args[0], args[1], padding=1) + args[2][:, None, None] + args[3]
    torch.testing.assert_close(total, summed)
    normed = torch.nn.functional.group_norm(summed, 32, args[5], args[6], 1e-5)
    torch.testing.assert_close(y, torch.nn.functional.silu(normed))


def test_which_groups_the_kernel_sums(monkeypatch):
    monkeypatch.setattr(conv2d, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(conv2d, "accepts", lambda x, weight: None)
    monkeypatch.setattr(conv2d, "profitable", lambda x, weight: True)

    def sums(images, height, width, columns, groups=32):
        shapes = (images, 64, height, width), (columns, 64, 3, 3)
        return conv2d.accepts_statistics(*(torch.empty(shape, device="meta") for shape in shapes), groups) is None

    assert all(sums(2, 128, 128, columns) for columns in (320, 640, 1280))
    assert not sums(2, 128, 128, 256)  # no tiles of 160
    assert not sums(2, 128, 128, 480)  # groups of 15
    assert sums(2, 128, 128, 320, 2) and not sums(2, 128, 128, 640, 2)  # groups of a whole tile, and of two
    assert not sums(2, 24, 24, 1280)  # another tile is quicker


# of what normalises: images, channels of the result, groups, height, width; by boxes 4 pixels wide and 2 high
BOXED = [(2, 96, 4, 5, 7), (1, 320, 32, 5, 7), (2, 48, 4, 2, 4), (3, 20, 2, 1, 1), (1, 240, 2, 4, 9)]
BOXED += [(1, 96, 4, 19, 21), (2, 64, 32, 3, 43)]  # parts of pixels, and more boxes than 32


@pytest.fixture(params=[False, True], ids=["boxes", "many boxes"])
def boxed(request, monkeypatch):
    """In place of the convolution a sum that is given as the residual, and its statistics."""
    if request.param:
        few_parts(monkeypatch)

    def with_statistics(x, weight, groups, shift, residual):
        images, columns, height, width = residual.shape
        boxes = [
            residual[:, :, y : y + 2, i : i + 4].double().reshape(images, groups, -1)
            for y in range(0, height, 2)
            for i in range(0, width, 4)
        ]
        means = torch.stack([box.mean(2) for box in boxes], 1)
        m2s = torch.stack([box.var(2, correction=0) * box.shape[2] for box in boxes], 1)
        assert means.shape == (images, len(boxes), groups)
        return residual, torch.stack([means, m2s]).float()

    monkeypatch.setattr(conv2d, "with_statistics", with_statistics)
    monkeypatch.setattr(conv2d, "boxes_of_image", lambda x: (-(-x.shape[3] // 4), -(-x.shape[2] // 2), 4, 2))
    monkeypatch.setattr(conv_group_norm, "accepts", lambda *args: None)


def given(shape, dtype, device):
    """Means differ between pixels, and between groups."""
    images, columns, groups, height, width = shape
    x = torch.zeros(images, 64, height, width, dtype=dtype, device=device)
    conv = torch.zeros(columns, 64, 3, 3, dtype=dtype, device=device)
    slope = torch.arange(height * width).reshape(height, width) * (4 / (height * width))
    total = torch.randn(images, columns, height, width) + slope + torch.arange(columns)[:, None, None] * (3 / columns)
    total = total.to(dtype).to(device).to(memory_format=NHWC)
    return x, conv, None, total, groups, *(randn(columns, dtype=dtype, device=device) for _ in range(2)), 1e-5


@pytest.mark.thinned
@pytest.mark.parametrize("boxed", [False, True], ids=["boxes", "many boxes"], indirect=True)
@each_dtype
@pytest.mark.parametrize("shape", BOXED, ids=str)
def test_normalising_by_the_statistics_of_boxes(device, boxed, shape, dtype):
    args = given(shape, dtype, device)
    total, y = conv_group_norm.launch(*args, silu=True)
    assert torch.equal(total, args[3]) and y.dtype == dtype
    assert y.shape == total.shape and y.is_contiguous(memory_format=NHWC)
    close(y, group_norm.reference(wide(total), shape[2], *map(wide, args[5:7]), 1e-5, None, True), scale=2)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_normalising_without_weight_or_bias(device, boxed, weighted, biased):
    *args, weight, term, eps = given(BOXED[0], torch.float16, device)
    weight, term = weight if weighted else None, term if biased else None
    total, y = conv_group_norm.launch(*args, weight, term, eps, out_dtype=torch.float32)
    assert y.dtype == torch.float32
    close(y, group_norm.reference(wide(total), 4, wide(weight), wide(term), eps), scale=2)


def test_normalising_around_a_large_mean(device, boxed):
    *args, weight, term, eps = given(BOXED[0], torch.float32, device)
    args[3] += 3000
    total, y = conv_group_norm.launch(*args, None, None, eps)
    # of which float32 knows 2**-24
    close(y, group_norm.reference(wide(total), 4, None, None, eps), scale=200)


def test_nan_in_the_statistics_stays_in_its_group_and_image(device, boxed):
    args = given(BOXED[0], torch.float16, device)
    _, clean = conv_group_norm.launch(*args)
    args[3][1, 30, 4, 6] = float("nan")  # group 1
    _, y = conv_group_norm.launch(*args)
    assert y[1, 24:48].isnan().all()
    y[1, 24:48] = clean[1, 24:48]
    assert torch.equal(y, clean)


def graph_of(size, layout, added):
    """A node, whose metadata tell of operands in such a layout."""
    graph, images, columns = fx.Graph(), size[0], size[4]
    shapes = [(images, *size[1:4]), (columns, size[1], 3, 3), (columns,) if added else (images, columns)]
    shapes += [(images, columns, *size[2:4]), (columns,), (columns,)]
    nodes = []
    for shape in shapes:
        node = graph.placeholder("x")
        val = torch.empty(shape, dtype=torch.float16, device="meta")
        node.meta["val"] = val.contiguous(memory_format=layout) if val.dim() == 4 else val
        nodes.append(node)
    x, conv, shift, residual, weight, term = nodes
    args = x, conv, shift, residual if added else None, 32, weight, term, 1e-5
    graph.call_function(conv_group_norm.launch, args, {"silu": True, "out_dtype": torch.float16})
    return graph


@pytest.mark.skipif(not triton_runtime.AVAILABLE or kernels.interpreted(), reason="needs TRITON_INTERPRET unset")
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("layout", [NHWC, torch.contiguous_format], ids=str)  # the graph tells that of the original
@pytest.mark.parametrize("size", SIZES[:4], ids=str)
def test_both_kernels_are_compiled_ahead(monkeypatch, size, layout, added):
    for home in (conv2d, two_pass):
        monkeypatch.setattr(home, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(object(), object()))
    found = precompile.launches(graph_of(size, layout, added), torch.device("cuda", 0)).values()
    convolution, normalise = found
    assert convolution.kernel is conv2d._SOURCE and normalise.kernel is two_pass.group_norm_normalise_kernel
    columns, pixels = size[4], size[2] * size[3]
    assert convolution.constants["GROUP"] == columns // 32 and convolution.constants["WIDTH"] == 160
    # absent operands are compiled alike
    assert convolution.args[3:] == (torch.float16, torch.float16 if added else None, torch.float32)
    boxes = -(-pixels // 128)
    assert normalise.constants["PARTS"] == (32 if boxes <= 32 else 128) and normalise.constants["num_warps"] == 4
    pointers = dict(zip(normalise.kernel.arg_names, normalise.args))
    assert pointers["partial"] == torch.float32 and pointers["x"] == pointers["out"] == torch.float16
    assert pointers["pixels"] == pixels and pointers["channels"] == columns


@pytest.mark.skipif(not triton_runtime.AVAILABLE or kernels.interpreted(), reason="needs TRITON_INTERPRET unset")
@pytest.mark.parametrize("added", [False, True])
def test_elsewhere_those_that_follow_each_other_are(monkeypatch, added):
    monkeypatch.setattr(two_pass, "multiprocessors", lambda device: 128)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (8, 9))
    found = precompile.launches(graph_of(SIZES[0], NHWC, added), torch.device("cuda", 0)).values()
    homes = [launch.kernel.fn.__module__.rpartition(".")[2] for launch in found]
    assert homes == ["fused_inputs" if added else "one_pass", "two_pass"]


def test_no_block_of_a_pair_is_beyond_the_images(monkeypatch):
    launched = []
    monkeypatch.setattr(conv2d, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(conv2d, "_launch", lambda x, weight, tile, *rest: launched.append(tile))
    for height in (32, 36):  # eight tiles of pixels, nine
        x, weight = (torch.empty(shape, device="meta") for shape in ((1, 64, height, 32), (1280, 64, 3, 3)))
        conv2d.with_statistics(x, weight, 32, None, None)
    even, odd = launched
    assert even.pair == 2 and odd.pair == 1
