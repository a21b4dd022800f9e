"""Kernels in CUDA C++: compiled for real cards, which needs none."""

from __future__ import annotations

import ctypes
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from sfast_ext.kernels import _cuda, conv2d, flash_attention, linear_geglu

HOPPER = "sm_90a"
REGISTERS = 65536  # of a multiprocessor
SHARED = 227 << 10  # bytes of it for its blocks together


@pytest.fixture(autouse=True)
def compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path / "kernels"))
    try:
        _cuda.checked(_cuda.bindings()[1].nvrtcVersion())
    except Exception:
        pytest.skip("needs the packages cuda-bindings and nvidia-cuda-nvrtc")


def built(name: str, constants: dict[str, int], spilled: int = 0) -> tuple[int, int]:
    """A kernel's registers, as they are given out, and bytes of shared memory beside those that a launch asks for."""
    code, log = _cuda.build((_cuda.SOURCES / f"{name}.cu").read_bytes(), HOPPER, constants)
    assert code[:4] == b"\x7fELF"
    # products that the compiler serialises, or registers that it spills, cost more than the kernel gains
    assert "Potential Performance Loss" not in log
    assert "warning" not in log
    assert int(re.search(r"(\d+) bytes spill stores", log)[1]) <= spilled
    registers = -(-int(re.search(r"Used (\d+) registers", log)[1]) // 8) * 8
    return registers, int(re.search(r"(\d+) bytes smem", log)[1])


def constants(size: int) -> dict[str, int]:
    return flash_attention.constants(size, flash_attention.SHAPES[size][0], torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("size", "shape"), [(n, s) for n, some in flash_attention.SHAPES.items() for s in some], ids=str
)
def test_flash_attention_compiles(size, shape, dtype):
    registers, fixed = built("flash_attention", flash_attention.constants(size, shape, dtype))
    assert registers * 128 * shape.groups * shape.blocks <= REGISTERS
    # the system takes 1 KB of each block's
    asked = flash_attention.shared_bytes(size, shape.stages) + fixed
    assert asked <= SHARED and shape.blocks * (1024 + asked) <= SHARED + 1024
    assert shape.stages - shape.lag >= 2


CONVOLUTIONS = [(tile, torch.float16) for tile in conv2d.TILES] + [(conv2d.TILES[0], torch.bfloat16)]
# with the statistics of groups: of 10, 20 and 40 channels, and of a whole tile
CONVOLUTIONS += [
    (conv2d.TILES[0]._replace(turns=turns), torch.float16, group)
    for turns, group in product((False, True), (10, 20, 40, 160))
]
CONVOLUTIONS += [(conv2d.TILES[0]._replace(turns=False), torch.bfloat16, 40)]


@pytest.mark.parametrize(
    "given", [conv2d.constants(*some) for some in CONVOLUTIONS], ids=lambda given: "-".join(map(str, given.values()))
)
def test_conv2d_compiles(given):
    # what comes once a tile, and has all its sums in registers, may lay a few aside
    registers, fixed = built("conv2d", given, 64 if given["GROUP"] and given["TURNS"] else 0)
    assert registers * 384 <= REGISTERS
    assert conv2d.shared_bytes(given) + fixed <= SHARED


GEGLUS = [linear_geglu.constants(tile, torch.float16) for tile in linear_geglu.TILES]
GEGLUS += [linear_geglu.constants(linear_geglu.TILES[0], torch.bfloat16, True, "tanh")]


@pytest.mark.parametrize("given", GEGLUS, ids=lambda given: "-".join(map(str, given.values())))
def test_linear_geglu_compiles(given):
    registers, fixed = built("linear_geglu", given)
    assert registers * 384 <= REGISTERS
    assert linear_geglu.shared_bytes(given) + fixed <= SHARED


def test_what_was_compiled_is_kept(monkeypatch, tmp_path):
    code = flash_attention._KERNEL.compiled(HOPPER, constants(40))
    assert flash_attention._KERNEL.compiled(HOPPER, constants(64)) != code
    assert len(list((tmp_path / "kernels").iterdir())) == 2
    monkeypatch.setattr(_cuda, "build", None)
    assert flash_attention._KERNEL.compiled(HOPPER, constants(40)) == code


@pytest.mark.parametrize(
    "spoilt", [lambda good: good[:-100], lambda good: b"", lambda good: good[:99] + b"x" + good[100:]]
)
def test_what_was_kept_and_is_spoilt_is_made_anew(spoilt, tmp_path):
    code = flash_attention._KERNEL.compiled(HOPPER, constants(64))
    (file,) = (tmp_path / "kernels").iterdir()
    good = file.read_bytes()
    file.write_bytes(spoilt(good))
    assert flash_attention._KERNEL.compiled(HOPPER, constants(64)) == code
    assert file.read_bytes() == good


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "kernels").write_text("no folder")
    assert flash_attention._KERNEL.compiled(HOPPER, constants(40))[:4] == b"\x7fELF"


def test_what_does_not_compile_says_why():
    with pytest.raises(_cuda.Unavailable, match="not_a_type"):
        _cuda.build(b"not_a_type x;", HOPPER, {})
    with pytest.raises(_cuda.Unavailable):
        _cuda.build(b"", "sm_1a", {})


def test_a_kernel_that_failed_is_not_asked_again(monkeypatch, caplog):
    kernel = _cuda.Source("flash_attention", flash_attention._prepared, ())
    device = torch.device("cuda", 0)
    assert kernel.available(device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (1, 0))
    with pytest.raises(_cuda.Unavailable):
        kernel.warmup(**constants(40))
    assert not kernel.available(device)
    assert kernel.available(torch.device("cuda", 1))
    assert "flash_attention.cu is not used" in caplog.text


def test_without_bindings_there_is_no_kernel(monkeypatch):
    monkeypatch.setattr(_cuda, "bindings", lambda: None)
    assert not flash_attention._KERNEL.available(torch.device("cuda", 0))


@pytest.mark.gpu
def test_loaded_in_a_thread_that_has_no_context_yet():
    kernel = _cuda.Source("flash_attention", flash_attention._prepared, ())
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(kernel.warmup, **constants(64)).result() is not None


def test_what_a_launch_hands_over(monkeypatch):
    """Addresses of tensors, null for None, and numbers as they are."""
    handed = []

    def launched(function, *rest):
        table = (ctypes.c_void_p * 3).from_address(rest[-2])
        handed.append([ctypes.c_uint64.from_address(place).value for place in table[:2]])
        handed.append(ctypes.c_int.from_address(table[2]).value)
        return (0,)

    tensor = torch.ones(3)
    source = _cuda.Source("none", lambda *args: ([*args, ctypes.c_int(7)], 128, 0), ())
    monkeypatch.setattr(_cuda, "bindings", lambda: (SimpleNamespace(cuLaunchKernel=launched), None))
    monkeypatch.setattr(source, "_function", lambda index, constants: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    source[(1,)](tensor, None)
    assert handed == [[tensor.data_ptr(), 0], 7]
