from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from sfast_ext.kernels import _cuda, copies
from sfast_ext.kernels.copies import Copies

from .support import randn

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# a step of SD 1.5: latents, timestep, prompt; and what is odd
SHAPES = [
    ((2, 4, 64, 64), torch.float16),
    ((), torch.int64),
    ((2, 77, 768), torch.float16),
    ((3,), torch.float16),
    ((5, 7), torch.uint8),
    ((1, 3), torch.float32),
    ((129,), torch.bool),
    ((2, 0, 4), torch.float32),
]


def some(device, shapes=SHAPES):
    made = [randn(*shape, dtype=torch.float32, device=CPU) for shape, _ in shapes]
    return [(30 * x).to(dtype).to(device) for x, (_, dtype) in zip(made, shapes)]


def poisoned(like):
    return [torch.full_like(x, 77) for x in like]


@pytest.fixture
def launched(monkeypatch):
    """How many tensors each launch took."""
    taken = []
    driver, nvrtc = _cuda.bindings()

    class Driver:
        def __getattr__(self, name):
            return getattr(driver, name)

        def cuLaunchKernel(self, function, across, down, *rest):
            taken.append(down)
            return driver.cuLaunchKernel(function, across, down, *rest)

    monkeypatch.setattr(_cuda, "bindings", lambda: (Driver(), nvrtc))
    return taken


def right(sources, targets, launched, expected):
    Copies(targets)(sources)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(targets, sources))
    assert launched == expected


@pytest.mark.gpu
def test_all_by_one_launch(launched):
    sources = some(CUDA)
    right(sources, poisoned(sources), launched, [7])  # but the one that is empty


@pytest.mark.gpu
def test_again_and_from_elsewhere(launched):
    targets = poisoned(some(CUDA))
    ours = Copies(targets)
    for _ in range(3):
        sources = [x.clone() for x in some(CUDA)]
        sources[0] *= 2
        ours(sources)
        assert all(torch.equal(a, b) for a, b in zip(targets, sources))
    assert launched == [7] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_memory_that_begins_anywhere(launched, offset):
    memory = torch.arange(4096, device=CUDA).to(torch.uint8)
    source = memory[offset : offset + 1024]
    target = torch.zeros(2048, dtype=torch.uint8, device=CUDA)
    right([source], [target[:1024]], launched, [1])
    assert not target[1024:].any()


@pytest.mark.gpu
def test_what_torch_copies(launched):
    plain = some(CUDA)[0]
    strided, negative = plain.transpose(2, 3), torch._neg_view(plain)
    large = torch.ones(copies._LARGEST + 1, dtype=torch.uint8, device=CUDA)
    sources = [strided, negative, plain.double(), large, plain.cpu()]
    targets = [torch.zeros(x.shape, dtype=torch.float16, device=CUDA) for x in sources]
    targets[3] = torch.zeros_like(large)
    Copies(targets)(sources)
    assert all(torch.equal(a, b.to(CUDA, a.dtype)) for a, b in zip(targets, sources))
    assert launched == []


@pytest.mark.gpu
def test_more_than_one_launch_takes(launched):
    sources = [torch.full((8,), i, device=CUDA) for i in range(copies._MOST + 3)]
    right(sources, poisoned(sources), launched, [copies._MOST])


@pytest.mark.gpu
def test_in_the_order_of_the_current_stream():
    side = torch.cuda.Stream()
    source, target = torch.zeros(1 << 20, device=CUDA), torch.ones(1 << 20, device=CUDA)
    ours = Copies([target])
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        source.fill_(3)
        ours([source])
        assert (target == 3).all()


@pytest.mark.gpu
def test_by_a_thread_that_has_called_nothing_of_the_runtime():
    source, target = torch.full((64,), 3, device=CUDA), torch.zeros(64, dtype=torch.int64, device=CUDA)
    ours = Copies([target])
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ours, [source]).result()
    assert (target == 3).all()


@pytest.mark.gpu
def test_without_the_kernel(monkeypatch):
    def broken(*args, **kwargs):
        raise _cuda.Unavailable("no")

    monkeypatch.setattr(copies._KERNEL, "_function", broken)
    sources = some(CUDA)
    targets = poisoned(sources)
    Copies(targets)(sources)
    assert all(torch.equal(a, b) for a, b in zip(targets, sources))


def test_a_launch_that_fails_is_the_last(monkeypatch):
    sources = some(CPU)
    targets = poisoned(sources)
    ours, tried = Copies(targets), []
    # -1 is a CPU's index
    ours._function = "a kernel"
    ours._kinds = {i: (t.dtype, t.nbytes, t.data_ptr()) for i, t in enumerate(targets) if t.numel()}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)

    def failing(*args):
        tried.append(args)
        return (201,)

    monkeypatch.setattr(_cuda, "bindings", lambda: (SimpleNamespace(cuLaunchKernel=failing), None))
    monkeypatch.setattr(_cuda, "bind", lambda index: None)
    monkeypatch.setattr(_cuda, "current_stream", lambda index: 0)
    for _ in range(2):
        ours(sources)
        assert all(torch.equal(a, b) for a, b in zip(targets, sources))
        sources = [x + x for x in sources]
    assert len(tried) == 1 and tried[0][2] == 7


def test_on_a_cpu_torch_copies():
    sources = some(CPU)
    targets = poisoned(sources)
    Copies(targets)([sources[0], None, *sources[2:]])
    assert targets[1] == 77
    targets[1] = sources[1]
    assert all(torch.equal(a, b) for a, b in zip(targets, sources))


def test_nothing_to_copy():
    Copies([])([])


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90a", "sm_120a"])
def test_compiles(architecture):
    if _cuda.bindings() is None:
        pytest.skip("needs cuda-bindings")
    try:
        _cuda.checked(_cuda.bindings()[1].nvrtcVersion())
    except Exception as exc:
        pytest.skip(f"NVRTC does not load: {exc}")
    source = (_cuda.SOURCES / "copies.cu").read_bytes()
    code, log = _cuda.build(source, architecture, {"MOST": copies._MOST})
    assert code and "spill stores" not in log.replace(" 0 bytes spill stores", "")
