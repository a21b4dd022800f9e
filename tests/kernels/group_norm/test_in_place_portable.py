"""Norms in CUDA C++ whose result takes given memory, on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx

from kernels import cuda_on_cpu
from kernels.cuda_on_cpu import TWO
from kernels.support import DTYPES, close, expected, randn
from sfast_ext import kernels
from sfast_ext.kernels.backend import nvrtc, precompile, triton_runtime
from sfast_ext.kernels.group_norm import add_group_norm, group_norm, portable

CPU = torch.device("cpu")
IMAGES = [((2, 320, 8, 8), 32), ((1, 640, 5, 7), 32), ((1, 30, 9, 7), 3), ((1, 300, 3, 5), 1), ((1, 8, 40, 25), 2)]

pytestmark = pytest.mark.skipif(kernels.interpreted(), reason="the interpreter is Triton's")
each_way = pytest.mark.parametrize("launches", [1, 2], ids=["one launch", "two launches"], indirect=True)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched, on the CPU."""
    found: list[str] = []

    def launch(source, grid, *args, **constants):
        found.append(source.name)
        cuda_on_cpu.launch(source, grid, *args, **constants)

    monkeypatch.setattr(nvrtc.Source, "_launch", launch)
    monkeypatch.setattr(nvrtc.Source, "supported", lambda source, device: True)
    return found


@pytest.fixture
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """See `cuda_on_cpu.group_norms_in`."""
    return cuda_on_cpu.group_norms_in(request.param, monkeypatch)


def image(shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    return randn(*shape, dtype=dtype, device=CPU, mean=mean).contiguous(memory_format=torch.channels_last)


@pytest.mark.thinned("shape", "dtype")
@each_way
@each_dtype
@pytest.mark.parametrize(("shape", "groups"), IMAGES, ids=str)
def test_group_norm_over_its_operand(launched, launches, dtype, shape, groups):
    x, shift = image(shape, dtype, mean=3.0), randn(*shape[:2], dtype=dtype, device=CPU)
    weight, bias = (randn(shape[1], dtype=dtype, device=CPU) for _ in range(2))
    before, args = x.clone(memory_format=torch.preserve_format), (groups, weight, bias, 1e-5, shift, True)
    with triton_runtime.without_triton():
        apart, over = group_norm.launch(x, *args), group_norm.launch(x, *args, out=x)
    # the same bits, whose memory ever; one launch has its own
    assert torch.equal(over, apart) and over.stride() == apart.stride() and launched == 2 * launches
    assert (over.data_ptr() == x.data_ptr()) == (launches == TWO) == group_norm.accepts_out(x, groups, triton=False)
    assert torch.equal(x, over if launches == TWO else before)


@pytest.mark.parametrize("launches", [2], indirect=True)
def test_group_norm_over_other_memory(launched, launches):
    x, room = (image((2, 40, 5, 7), torch.float16) for _ in range(2))
    last = room.contiguous()
    given = (room, last, room.float(), room[:1])
    with triton_runtime.without_triton():
        wanted = group_norm.launch(x, 8, None, None, 1e-5)
        found = [group_norm.launch(x, 8, None, None, 1e-5, out=out) for out in given]
        # what is not channels last is copied, and the copy overwritten
        room = last.clone()
        copied = group_norm.launch(last, 8, None, None, 1e-5, out=last)
        wide = group_norm.launch(x, 8, None, None, 1e-5, out_dtype=torch.float32, out=x)
    assert all(torch.equal(y, wanted) for y in found)
    assert [y.data_ptr() == out.data_ptr() for y, out in zip(found, given)] == [True, False, False, False]
    close(copied, expected(group_norm, last, 8, None, None, 1e-5), scale=2)
    assert torch.equal(last, room) and wide.dtype == torch.float32
    close(wide, expected(group_norm, x, 8, None, None, 1e-5), scale=20)


@pytest.mark.parametrize("launches", [2], indirect=True)
@pytest.mark.parametrize(("offset", "pack"), [(0, 8), (4, 4), (1, 1)])
def test_accesses_are_aligned_in_the_memory_that_is_given(offset, pack, launches, monkeypatch):
    packs: list[int] = []

    def launch(source, grid, *args, **constants):
        packs.append(constants["PACK"])
        cuda_on_cpu.launch(source, grid, *args, **constants)

    monkeypatch.setattr(nvrtc.Source, "_launch", launch)
    monkeypatch.setattr(nvrtc.Source, "supported", lambda source, device: True)
    x = image((1, 64, 5, 7), torch.float16)
    memory = torch.empty(x.numel() + offset, dtype=x.dtype)[offset:]
    room = memory.view(1, 5, 7, 64).permute(0, 3, 1, 2)
    with triton_runtime.without_triton():
        found = group_norm.launch(x, 8, None, None, 1e-5, out=room)
    assert found.data_ptr() == room.data_ptr() and packs == [pack, pack]
    close(found, expected(group_norm, x, 8, None, None, 1e-5), scale=2)


@pytest.mark.thinned("dtype", "shape")
@each_way
@each_dtype
@pytest.mark.parametrize("shape", [(2, 320, 4, 6), (1, 30, 9, 7)], ids=str)
def test_the_norm_of_a_sum_over_a_summand(launched, launches, dtype, shape):
    x, residual = image(shape, dtype, mean=3.0), image(shape, dtype)
    args = (torch.ones(shape[1], dtype=dtype), residual, 0.7, 10, None, None, 1e-5, True)
    with triton_runtime.without_triton():
        apart = add_group_norm.launch(x, *args)
        total, over = add_group_norm.launch(x, *args, out=(None, x))
    assert torch.equal(total, apart[0]) and torch.equal(over, apart[1]) and launched == 2 * launches
    taken = group_norm.accepts_out(x, 10, triton=False, fused=True)
    assert (over.data_ptr() == x.data_ptr()) == (launches == TWO) == taken
    assert total.data_ptr() not in (x.data_ptr(), residual.data_ptr())


@pytest.mark.parametrize("pair", [False, True])
def test_what_runs_in_place_is_compiled_ahead(pair, monkeypatch):
    monkeypatch.setattr(nvrtc.Source, "supported", lambda source, device: True)
    monkeypatch.setattr(portable, "multiprocessors", lambda device: 28)
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(1, 128, 256, 256, dtype=torch.float16, device="meta")
    norm = 32, None, None, 1e-5
    if pair:
        graph.call_function(add_group_norm.launch, (x, None, x, 1.0, *norm), {"out": (None, x)})
    else:
        graph.call_function(group_norm.launch, (x, *norm), {"out": x})
    with triton_runtime.without_triton():
        found = precompile.launches(graph, torch.device("cuda", 0)).values()
    statistics, normalise = found
    assert statistics.kernel is portable.STATISTICS and normalise.kernel is portable.NORMALISE
    # the norm of a sum is written over a summand, which the second launch does not read
    assert normalise.constants["IN_PLACE"] == int(not pair)
