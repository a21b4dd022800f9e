"""Kernels that begin before the one in front of them has ended: never with what that one may still write."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.support import driver_copies, driver_zeros, needs_nvrtc, randn
from sfast_ext import kernels
from sfast_ext.kernels.attention import flash_attention, query_attention
from sfast_ext.kernels.backend import cuda_driver, cuda_libraries, input_copies, launch_log, nvrtc, pdl, triton_runtime
from sfast_ext.kernels.backend.cuda_libraries import Bindings
from sfast_ext.kernels.conv import conv2d
from sfast_ext.kernels.eight_bits import wgmma_conv8, wgmma_gemm8
from sfast_ext.kernels.group_norm import conv_group_norm
from sfast_ext.kernels.linear import linear_geglu, linear_layer_norm
from sfast_ext.kernels.pointwise import layer_norm
from sfast_ext.plans import recorded_run

CUDA = torch.device("cuda")
MODULES = (conv2d, flash_attention, linear_geglu, linear_layer_norm, query_attention, wgmma_conv8, wgmma_gemm8)


@pytest.fixture(autouse=True)
def poisoned():
    """Not here: the kernel that fills new memory would part all others."""


class Driver:
    """Notes how kernels were launched, and launches none."""

    def __init__(self):
        self.launched = []

    def cuLaunchKernel(self, function, *rest):
        self.launched.append("in turn")

    def cuLaunchKernelEx(self, config, function, *rest):
        early = cuda_driver.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert (config.attrs[0].id, config.attrs[0].value[0]) == (early, 1)
        assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (7, 1, 1) and config.numAttrs == 1
        assert (config.blockDimX, config.sharedMemBytes, config.hStream) == (384, 1000, 5)
        self.launched.append("early")


@pytest.fixture
def driver(monkeypatch):
    stand_in = Driver()
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(stand_in, None))
    monkeypatch.setattr(pdl, "capture_keeps_pdl", lambda: True)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: pdl.MIN_CAPABILITY)
    monkeypatch.setattr(nvrtc, "current_stream", lambda index: 5)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    # on a CPU
    monkeypatch.setattr(
        pdl, "readonly_spans", lambda some: sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in some)
    )
    return stand_in


def source(reads_before_wait=("weight",)):
    made = nvrtc.Source(
        "none", lambda *args, **_: ([ctypes.c_int(1)], 384, 1000), ("x", "weight"), None, reads_before_wait
    )
    made._function = lambda *args: "a kernel"
    return made


X, WEIGHT, OTHER = (torch.zeros(64, 64) for _ in range(3))
FILTERS = torch.zeros(8, 16, 3, 3)


OPERANDS = pytest.mark.parametrize(
    ("weight", "wanted"),
    [
        (WEIGHT, "early"),
        (WEIGHT[8:16], "early"),
        (FILTERS.view(8, 3, 3, 16).permute(0, 3, 1, 2), "early"),  # as channels_last
        (FILTERS.view(8, 3, 3, 16)[..., :8].permute(0, 3, 1, 2), "in turn"),
        (WEIGHT[:, :8], "in turn"),  # its rows are apart
        (X, "in turn"),
        (torch.cat([WEIGHT, X]), "in turn"),
    ],
    ids=["a weight", "rows of it", "filters", "some of each filter", "columns of it", "another tensor", "a copy"],
)


@OPERANDS
def test_only_what_lies_still_is_read_early(driver, weight, wanted):
    with pdl.pdl_capture([OTHER, WEIGHT, FILTERS]):
        source()[7, 1, 1](X, weight)
    assert driver.launched == [wanted]


@OPERANDS
def test_a_launch_that_is_repeated_begins_early_in_a_capture_as_well(driver, weight, wanted):
    repeat = repeated(source(), weight)
    with pdl.pdl_capture([OTHER, WEIGHT, FILTERS]):
        repeat(weight)
    assert driver.launched == ["in turn", wanted]


def test_a_launch_that_is_repeated_asks_for_the_addresses_of_now(driver):
    repeat = repeated(source(), torch.zeros(64, 64))
    with pdl.pdl_capture([WEIGHT]):
        repeat(WEIGHT)
    repeat(WEIGHT)
    assert driver.launched == ["in turn", "early", "in turn"]


@pytest.mark.parametrize(("reads", "wanted"), [((), "early"), (None, "in turn")])
def test_a_launch_that_is_repeated_and_reads_nothing_early_or_never_waits(driver, reads, wanted):
    repeat = repeated(source(reads), X)
    with pdl.pdl_capture([]):
        repeat(X)
    assert driver.launched == ["in turn", wanted]


def test_a_launch_that_is_repeated_on_older_cards(monkeypatch, driver):
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (8, 9))
    repeat = repeated(source(), WEIGHT)
    with pdl.pdl_capture([WEIGHT]):
        repeat(WEIGHT)
    assert driver.launched == ["in turn", "in turn"]


def repeated(kernel, weight):
    """Launches a kernel, and gives what repeats that with another weight, of the same size."""
    entries = []
    with launch_log.listening(entries.append):
        kernel[7, 1, 1](X, weight)
    (entry,) = entries
    step = recorded_run._Launch(entry, lambda x: (0 if x is X else 1, 0))
    return lambda other: step([X, other], 5)


def test_memory_that_goes_beyond_what_lies_still(driver):
    whole = torch.zeros(128, 64)
    with pdl.pdl_capture([whole[:64]]):
        source()[7,](X, whole[:64])
        source()[7,](X, whole[32:96])
        source()[7,](X, whole)
    assert driver.launched == ["early", "in turn", "in turn"]


def test_what_reads_nothing_early_may_begin_so_anywhere(driver):
    with pdl.pdl_capture([]):
        source(())[7,](X, OTHER)
    assert driver.launched == ["early"]


def test_in_turn_outside_of_captures_and_if_nothing_is_told(monkeypatch, driver):
    source()[7,](X, WEIGHT)
    with pdl.pdl_capture([]):
        source()[7,](X, WEIGHT)
    with pdl.pdl_capture([WEIGHT]):
        source(None)[7,](X, WEIGHT)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        source()[7,](X, WEIGHT)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(pdl, "capture_keeps_pdl", lambda: False)
    with pdl.pdl_capture([WEIGHT]):
        source()[7,](X, WEIGHT)
    assert driver.launched == ["in turn"] * 5


def test_in_turn_on_older_cards(monkeypatch, driver):
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (8, 9))
    with pdl.pdl_capture([WEIGHT]):
        source()[7,](X, WEIGHT)
    assert driver.launched == ["in turn"]


@pytest.mark.parametrize(
    ("built", "runs", "kept"),
    [
        ("13.0", 13000, True),
        ("12.3", 12030, True),
        ("12.1", 13000, False),
        ("12.8", 12020, False),
        (None, 13000, False),
    ],
)
def test_which_cuda_keeps_beginnings(monkeypatch, built, runs, kept):
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(
        cuda_libraries, "bindings", lambda: Bindings(SimpleNamespace(cuDriverGetVersion=lambda: runs), None)
    )
    pdl.capture_keeps_pdl.cache_clear()
    try:
        assert pdl.capture_keeps_pdl() == kept
    finally:
        pdl.capture_keeps_pdl.cache_clear()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_who_begins_early_waits(module):
    """In each role of its threads, and says which arguments it reads before."""
    text = (nvrtc.SOURCES / f"{module._SOURCE.name}.cu").read_text()
    roles = 3 if "kHelperThreads" in text else 2 if "setmaxnreg" in text else 1
    assert text.count("pdl_wait();") == roles and text.count("pdl_launch_dependents();") == 1
    early = text.partition("pdl_wait();")[0]
    assert ("load_weight(" in early) == (module._SOURCE.reads_before_wait == ("weight",))
    assert set(module._SOURCE.reads_before_wait) <= set(module._SOURCE.arg_names)


PORTABLE = [s for k in kernels.registered().values() if k.portable for s in k.cuda_sources if not s.hopper]


@pytest.mark.parametrize("kernel", list(dict.fromkeys(PORTABLE)), ids=lambda kernel: kernel.name)
def test_kernels_for_any_card_wait_first(kernel):
    text = (nvrtc.SOURCES / f"{kernel.name}.cu").read_text()
    _, _, after = text.partition('extern "C" __global__')
    assert after.partition("{\n")[2].strip().startswith("pdl_wait();") and kernel.reads_before_wait == ()


def test_nothing_is_loaded_before_the_wait_and_all_loads_are_coherent():
    """In machine code: loads of the compiler's choice could go ahead, or through the cache for constants."""
    needs_nvrtc()
    disassembler = Path(pytest.importorskip("triton").__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not disassembler.exists():
        pytest.skip("this Triton has no nvdisasm")
    given = layer_norm.constants(1280, 4, torch.float16, torch.float16, True)
    code, _ = nvrtc.build((nvrtc.SOURCES / "layer_norm.cu").read_bytes(), "sm_90", given)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        listed = subprocess.run([disassembler, "-c", file.name], capture_output=True, text=True, check=True).stdout
    before, wait, after = listed.partition("ACQBULK")
    assert wait and "LDG" not in before and "LDG" in after and "CONSTANT" not in after


def test_a_kernel_that_says_nothing_does_not_wait():
    assert (
        input_copies._SOURCE.reads_before_wait is None and "pdl_wait" not in (nvrtc.SOURCES / "copies.cu").read_text()
    )


def slow(x, times=20):
    """x again, by kernels that take some time and write their result at the end of it."""
    for _ in range(times):
        x = (x.float() * 1.0).to(x.dtype)
    return x


def block(weights):
    """A chain as in a transformer, of kernels that each need the one in front: the last of them starts anew."""
    product, normed, gate, down, keys = weights
    norm = normed[0], normed[1], 1e-5
    bias = normed[2]

    def run(x):
        x = slow(x)
        for _ in range(3):
            total, y = linear_layer_norm.launch(x[0], product, bias, x[0], *norm)
            attended = query_attention.launch(y[None].view(2, -1, 640), product, keys[0], keys[1])
            total, y = linear_layer_norm.launch(attended.transpose(1, 2).reshape(-1, 640), product, bias, total, *norm)
            wide = linear_geglu.launch(y, gate, None)
            total, y = linear_layer_norm.launch(wide, down, bias, total, *norm)
            x = total[None]
        return x, y

    return run


def operands():
    def weight(rows, depth):
        return randn(rows, depth, dtype=torch.float16, device=CUDA, std=depth**-0.5)

    normed = [randn(640, dtype=torch.float16, device=CUDA) for _ in range(3)]
    keys = [randn(2, 10, 77, 64, dtype=torch.float16, device=CUDA) for _ in range(2)]
    return weight(640, 640), normed, weight(5120, 640), weight(640, 2560), keys


def captured(run, x, still):
    run(x)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side), pdl.pdl_capture(still) if still is not None else contextlib.nullcontext():
        graph.capture_begin()
        results = run(x)
        graph.capture_end()
    torch.cuda.synchronize()
    return graph, results


def alike(x, turns, early, wanted, results, times=10):
    """Replays of both graphs give the same to the bit, whatever x is."""
    for _ in range(times):
        x.copy_(torch.randn_like(x))
        turns.replay()
        for result in results:  # what was there before would be as good
            result.fill_(7)
        early.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, wanted))


@pytest.fixture
def launches(monkeypatch):
    """How many kernels began early."""
    begun = []
    honest = pdl.launch_config
    monkeypatch.setattr(pdl, "launch_config", lambda *args: (begun.append(args), honest(*args))[1])
    return begun


@pytest.mark.gpu
def test_the_same_to_the_bit_as_in_turn(launches):
    weights = operands()
    still = [weights[0], *weights[1], weights[2], weights[3]]
    x = randn(1, 8192, 640, dtype=torch.float16, device=CUDA)
    run = block(weights)
    turns, wanted = captured(run, x, None)
    assert not launches
    early, results = captured(run, x, still)
    if not pdl.capture_keeps_pdl() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper and CUDA 12.3")
    assert len(launches) == 15
    alike(x, turns, early, wanted, results, 30)


@pytest.mark.gpu
def test_a_weight_that_has_changed_before_a_replay():
    weights = operands()
    x = randn(1, 8192, 640, dtype=torch.float16, device=CUDA)
    run = block(weights)
    early, results = captured(run, x, [weights[0], *weights[1], weights[2], weights[3]])
    for _ in range(10):
        with torch.no_grad():
            for weight in (weights[0], weights[2], weights[3]):
                weight.copy_(slow(torch.randn_like(weight) * weight.shape[1] ** -0.5))
        early.replay()
        got = [result.clone() for result in results]
        assert all(torch.equal(a, b) for a, b in zip(got, run(x)))


@pytest.mark.gpu
def test_a_weight_that_the_graph_itself_writes(launches):
    weights = operands()
    x, source_ = randn(8192, 640, dtype=torch.float16, device=CUDA), weights[0].clone()
    made = torch.zeros_like(source_)

    def run(x):
        made.copy_(slow(source_, 40))
        return linear_layer_norm.launch(x, made, weights[1][2], x, weights[1][0], weights[1][1], 1e-5)

    graph, results = captured(run, x, [weights[0], *weights[1]])
    assert not launches
    for _ in range(10):
        source_.copy_(torch.randn_like(source_) * 0.04)
        made.zero_()
        graph.replay()
        wanted = linear_layer_norm.launch(x, source_, weights[1][2], x, weights[1][0], weights[1][1], 1e-5)
        assert all(torch.equal(a, b) for a, b in zip(results, wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", ["copies", "zeros"])
def test_behind_what_is_no_kernel(launches, nodes):
    weights = operands()
    x = randn(8192, 640, dtype=torch.float16, device=CUDA)
    taken = torch.zeros_like(x)

    def run(x):
        stream = torch.cuda.current_stream().cuda_stream
        taken.copy_(slow(x))
        if nodes == "copies":
            driver_copies(taken, x, x.nbytes, stream)
        else:
            driver_zeros(taken, x.nbytes // 2, stream)
        return linear_layer_norm.launch(taken, weights[0], weights[1][2], x, weights[1][0], weights[1][1], 1e-5)

    turns, wanted = captured(run, x, None)
    early, results = captured(run, x, [weights[0]])
    alike(x, turns, early, wanted, [*results, taken])


@pytest.mark.gpu
def test_convolutions_and_attention_to_the_bit(launches):
    filters = [randn(640, 640, 3, 3, dtype=torch.float16, device=CUDA, std=0.01) for _ in range(2)]
    filters = [weight.to(memory_format=torch.channels_last) for weight in filters]
    product = randn(640, 640, dtype=torch.float16, device=CUDA, std=0.04)
    x = randn(2, 640, 64, 64, dtype=torch.float16, device=CUDA).to(memory_format=torch.channels_last)

    def run(x):
        for weight in filters:
            x = conv2d.launch(slow(x, 5), weight)
            x = conv2d.launch(x, weight)
        tokens = x.permute(0, 2, 3, 1).reshape(2, 4096, 640)
        q = (tokens @ product).view(2, 4096, 10, 64).transpose(1, 2)
        attended = flash_attention.launch(q, q, q, None)
        return x, attended

    turns, wanted = captured(run, x, None)
    assert not launches
    early, results = captured(run, x, filters)
    if not pdl.capture_keeps_pdl() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper and CUDA 12.3")
    assert len(launches) == 5
    alike(x, turns, early, wanted, results)


@pytest.mark.gpu
def test_between_kernels_for_any_card_to_the_bit(launches):
    """Without Triton: they wait first, whoever is in front and whoever has begun behind them."""
    filters = randn(640, 640, 3, 3, dtype=torch.float16, device=CUDA, std=0.01).to(memory_format=torch.channels_last)
    _, (scale, offset, bias), gate, down, _ = operands()
    norm = scale, offset, 1e-5
    x = randn(2, 640, 64, 64, dtype=torch.float16, device=CUDA).to(memory_format=torch.channels_last)

    @triton_runtime.without_triton()
    def run(x):
        for _ in range(3):
            _, y = conv_group_norm.launch(slow(x, 5), filters, bias, x, 32, *norm)
            tokens = y.permute(0, 2, 3, 1).reshape(2, 4096, 640)
            wide = linear_geglu.launch(layer_norm.launch(tokens, *norm), gate, None)
            total, y = linear_layer_norm.launch(wide, down, bias, tokens, *norm)
            x = y.view(2, 64, 64, 640).permute(0, 3, 1, 2)
        return x, total

    turns, wanted = captured(run, x, None)
    assert not launches
    early, results = captured(run, x, [filters, gate, down])
    if not pdl.capture_keeps_pdl() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper and CUDA 12.3")
    assert len(launches) == 15
    alike(x, turns, early, wanted, results, 30)
