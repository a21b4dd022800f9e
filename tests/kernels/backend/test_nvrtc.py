"""Kernels in CUDA C++: compiled for real cards, which needs none."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pairs import every

from kernels import compiled
from kernels.backend.transformer_cases import transformer_cases
from kernels.support import needs_nvrtc
from sfast_ext import freed_memory
from sfast_ext.kernels.attention import flash_attention, query_attention
from sfast_ext.kernels.backend import cuda_libraries, cuda_tier, nvrtc, triton_runtime
from sfast_ext.kernels.backend.cuda_libraries import Bindings
from sfast_ext.kernels.conv import conv2d, narrow_conv_portable, upsample, upsample_conv2d
from sfast_ext.kernels.eight_bits import group_norm8, layer_norm8, quantise_rows, quantise_weights
from sfast_ext.kernels.group_norm import portable
from sfast_ext.kernels.group_norm.two_pass import Norm
from sfast_ext.kernels.linear import linear_geglu, linear_layer_norm
from sfast_ext.kernels.pointwise import bias_add, geglu, layer_norm, timestep_embedding

HOPPER = "sm_90a"
REGISTERS = 65536  # of a multiprocessor
SHARED = 227 << 10  # bytes of it for its blocks together


@pytest.fixture(autouse=True)
def compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path / "kernels"))
    needs_nvrtc()


def built(name: str, constants: dict[str, int], spilled: int = 0, architecture: str = HOPPER) -> tuple[int, int]:
    """A kernel's registers, as they are given out, and bytes of shared memory beside those that a launch asks for."""
    code, log = compiled.build(name, architecture, constants)
    assert code[:4] == b"\x7fELF"
    # products that the compiler serialises, or registers that it spills, cost more than the kernel gains
    assert "Potential Performance Loss" not in log
    assert "warning" not in log
    assert int(re.search(r"(\d+) bytes spill stores", log)[1]) <= spilled
    registers = -(-int(re.search(r"Used (\d+) registers", log)[1]) // 8) * 8
    shared = re.search(r"(\d+) bytes smem", log)
    return registers, int(shared[1]) if shared else 0


def constants(size: int) -> dict[str, int]:
    return flash_attention.constants(size, flash_attention.SHAPES[size][0], torch.float16)


@pytest.mark.thinned("size", "dtype")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("size", "shape"), [(n, s) for n, some in flash_attention.SHAPES.items() for s in some], ids=str
)
def test_flash_attention_compiles(size, shape, dtype):
    given = flash_attention.constants(size, shape, dtype)
    registers, fixed = built("flash_attention", given)
    assert registers * 128 * shape.groups * shape.blocks <= REGISTERS
    # the system takes 1 KB of each block's
    asked = flash_attention.shared_bytes(given) + fixed
    assert asked <= SHARED and shape.blocks * (1024 + asked) <= SHARED + 1024
    assert shape.stages - shape.lag >= 2
    # each group that shares rows has some of the keys
    assert not shape.even or shape.fewest > 64 * (shape.groups - 1)


CONVOLUTIONS = [(tile, torch.float16) for tile in conv2d.TILES] + [(conv2d.TILES[0], torch.bfloat16)]
# with the statistics of groups: of 10, 20 and 40 channels, and of a whole tile
CONVOLUTIONS += [
    (conv2d.TILES[0]._replace(pingpong=pingpong), torch.float16, group)
    for pingpong, group in ((False, 10), (False, 160), (True, 20), (True, 40), (True, 160))
]
CONVOLUTIONS += [(conv2d.TILES[0]._replace(pingpong=pingpong, pair=1), torch.float16, 10) for pingpong in (False, True)]
# tiles with and without a pair differ in the loads alone: about half of all have each width, split and kind of group
CONVOLUTIONS = [*every(2, *CONVOLUTIONS), (conv2d.TILES[0]._replace(pingpong=False), torch.bfloat16, 40)]


@pytest.mark.long(but=[0, 3, 4, 7, 9])
@pytest.mark.parametrize(
    "given", [conv2d.constants(*some) for some in CONVOLUTIONS], ids=lambda given: "-".join(map(str, given.values()))
)
def test_conv2d_compiles(given):
    # what comes once a tile, and has all its sums in registers, may lay a few aside
    registers, fixed = built("conv2d", given, 64 if given["GROUP"] and given["PINGPONG"] else 0)
    assert registers * 384 <= REGISTERS
    assert conv2d.shared_bytes(given) + fixed <= SHARED


GEGLUS = [linear_geglu.constants(tile, torch.float16) for tile in every(2, *linear_geglu.TILES)]
GEGLUS += [linear_geglu.constants(linear_geglu.TILES[0], torch.bfloat16, True, "tanh")]


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("given", GEGLUS, ids=lambda given: "-".join(map(str, given.values())))
def test_linear_geglu_compiles(given):
    registers, fixed = built("linear_geglu", given)
    assert registers * 384 <= REGISTERS
    assert linear_geglu.shared_bytes(given) + fixed <= SHARED


NORMED = [
    (tile, columns)
    for tile in linear_layer_norm.TILES
    for columns in (320, 640, 1280)
    if linear_layer_norm._fits(tile, columns)
]
# the other type multiplies with another instruction; each tile with one of both, at its widest or narrowest
WIDEST, NARROWEST = {tile: (tile, n) for tile, n in NORMED}, {tile: (tile, n) for tile, n in NORMED[::-1]}
NORMED_TYPES = [(*case, torch.float16) for case in list(WIDEST.values())[::2]]
NORMED_TYPES += [(*case, torch.bfloat16) for case in list(NARROWEST.values())[1::2]]


@pytest.mark.long(but=[0, 2, 4])
@pytest.mark.parametrize(("tile", "columns", "dtype"), NORMED_TYPES, ids=str)
def test_linear_layer_norm_compiles(tile, columns, dtype):
    given = linear_layer_norm.constants(tile, columns, dtype)
    registers, fixed = built("linear_layer_norm", given)
    blocks = max(1, 128 // tile.rows)  # which find room for each other, though not all are launched so
    # warps share out anew what they begin with: those that multiply take what the four others give
    source = (nvrtc.SOURCES / "linear_layer_norm.cu").read_text()
    less = int(re.findall(r"setmaxnreg\.dec\.sync\.aligned\.u32 (\d+)", source)[0])
    shares = map(int, re.findall(r"ROWS == 64 \? (\d+) : ROWS == 128 \? (\d+) : (\d+);", source)[0])
    threads, more = 2 * tile.rows + 128, dict(zip((64, 128, 192), shares))[tile.rows]
    assert registers * threads * blocks <= REGISTERS
    assert less * 128 + more * 2 * tile.rows <= registers * threads
    asked = linear_layer_norm.shared_bytes(given) + fixed
    assert asked <= SHARED and blocks * (1024 + asked) <= SHARED + 1024


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_query_attention_compiles(dtype):
    registers, fixed = built("query_attention", query_attention.constants(dtype))
    # those that multiply take what the others give
    source = (nvrtc.SOURCES / "query_attention.cu").read_text()
    less, more = map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32 (\d+)", source))
    assert less * 128 + more * 256 <= registers * 384 <= REGISTERS
    assert query_attention.shared_bytes() + fixed <= SHARED


def portable_cases() -> list[tuple[str, dict[str, int]]]:
    """Of each kernel for any card, what float16 and float32 ask for at a UNet's sizes."""
    found: list[tuple[str, dict[str, int]]] = []
    for dtype, pack in ((torch.float16, 8), (torch.bfloat16, 8), (torch.float32, 4), (torch.float16, 1)):
        found += [("bias_add", bias_add.constants(pack, dtype)), ("geglu", geglu.constants(pack, dtype, False, "none"))]
        for columns in (320, 640, 1280):
            for add in (False, True):
                given = layer_norm.constants(columns, pack, dtype, dtype, add)
                assert given is not None
                found.append(("layer_norm", given))
        found.append(("upsample", upsample.constants(pack, dtype)))
        found.append(("upsample_conv2d", upsample_conv2d.constants(pack, dtype)))
        channels = 4 if pack > 1 else 9
        found.append(("narrow_conv_in", narrow_conv_portable.in_constants(channels, pack, dtype)))
        if pack > 1:
            found.append(("narrow_conv_out", narrow_conv_portable.out_constants(channels, dtype)))
    for time, dtype in ((torch.int64, torch.float16), (torch.float32, torch.float32)):
        found.append(("timestep_embedding", timestep_embedding.constants(time, dtype)))
    return found + eight_bits_cases() + group_norm_cases() + transformer_cases()


def eight_bits_cases() -> list[tuple[str, dict[str, int]]]:
    """Of the kernels that write 8 bits, what a UNet's sizes ask for, and the widest rows."""
    found: list[tuple[str, dict[str, int]]] = []
    for dtype in (torch.float16, torch.bfloat16):
        given = [(320, 8, 64), (1280, 8, 256), (2560, 8, 128), (5120, 8, 0), (10240, 8, 256), (40960, 8, 0), (77, 1, 0)]
        rows = [quantise_rows.constants(columns, pack, dtype, group) for columns, pack, group in given]
        norms = [layer_norm8.constants(columns, 8, dtype, add) for columns in (320, 1280) for add in (False, True)]
        for name, constants in (("quantise_rows", rows), ("layer_norm8", norms)):
            assert None not in constants
            found += [(name, each) for each in constants if each is not None]
        found.append(("quantise_weights", quantise_weights.constants(dtype)))
    return found


def group_norm_cases() -> list[tuple[str, dict[str, int]]]:
    """What group norms of SD 1.5 at 512x512 and SDXL at 1024x1024 launch, by `portable.normalised` itself."""
    found: dict[Any, tuple[str, dict[str, int]]] = {}

    def launch_kernel(source, grid, *args, **given):
        found.setdefault((source.name, *given.items()), (source.name, given))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable, "launch_kernel", launch_kernel)
        patch.setattr(group_norm8, "launch_kernel", launch_kernel)
        patch.setattr(group_norm8, "accepts", lambda *operands: None)
        patch.setattr(portable, "multiprocessors", lambda device: 28)
        for dtype, fused in product((torch.float16, torch.float32), (False, True)):
            for channels, size in ((320, 128), (320, 64), (960, 32), (640, 32), (1280, 16), (2560, 16), (1280, 8)):
                inputs = portable.Inputs(torch.empty(2, size, size, channels, dtype=dtype, device="meta"), fused=fused)
                for out in (None, inputs.a):
                    assert portable.normalised(inputs, 32, Norm(None, None, 1e-5, True, dtype), out=out) is not None
                if dtype == torch.float16:
                    group_norm8.normalised(inputs, 32, Norm(None, None, 1e-5, True, dtype))
    return list(found.values())


PORTABLE = portable_cases()


CARDS = {70, 75, 80, 90, 100, 120}
MOST = 3 if os.environ.get("SFAST_ALL_CASES") else 2
"""Cards that the variant of a kernel which is most used is compiled for, of the three kinds that differ."""
HALF = cuda_tier.TYPES[torch.float16]
MOST_USED = [(name, given) for name, given in PORTABLE if given.get("TYPE", given.get("OUT")) == HALF]
MOST_USED = list({name: (name, given) for name, given in reversed(MOST_USED)}.values())
# of the other variants some; `make cuda-table` compiles all that models launch
OTHERS = every(18, *(case for case in PORTABLE if case not in MOST_USED))
CHOSEN = [case for case in PORTABLE if case in OTHERS or case in MOST_USED]


def test_portable_kernels_differ_only_between_cards_before_and_after_8_0_and_9_0():
    # so that three cards tell of all; registers on each are in docs/generated/cuda.md
    texts = [nvrtc.SOURCES / f"{name}.cu" for name in {name for name, _ in PORTABLE}]
    texts += [nvrtc.SOURCES / f"{name}.h" for name in ("elements", "group_norm", "layer_norm", "quantise")]
    found = {line for text in texts for line in text.read_text().splitlines() if "ARCH" in line}
    assert found == {"#if __CUDA_ARCH__ >= 800", "#if __CUDA_ARCH__ >= 900"}


@pytest.mark.parametrize(
    ("name", "given"), CHOSEN, ids=[f"{name}-{'-'.join(map(str, given.values()))}" for name, given in CHOSEN]
)
def test_portable_kernels_compile_for_every_kind_of_card(name, given):
    _, known = nvrtc.targets()
    served = sorted(CARDS & set(known))
    cards = served[0], 80, served[-1]
    # on two of them, and a variant that is not the one most used on one: others than the variant before it
    first, count = CHOSEN.index((name, given)) % 3, MOST if (name, given) in MOST_USED else 1
    for capability in (*cards, *cards)[first : first + count]:
        # the largest variant, on 8.0 alone
        spilled = 8 if name == "group_norm_whole" else 0
        registers, fixed = built(name, given, spilled, f"sm_{capability}")
        threads = given.get("THREADS", 32 * given.get("WARPS", 8)) * given.get("ROWS", 1)
        assert given.get("BLOCKS", 1) * registers * threads <= REGISTERS
        # two blocks of a multiprocessor or one that fills it, in half of the shared memory that every card has
        assert (1 if threads > 512 else 2) * registers * threads <= REGISTERS and fixed <= 24 << 10


COMPILED = {
    **dict.fromkeys((name for name, _ in PORTABLE), test_portable_kernels_compile_for_every_kind_of_card),
    "conv2d": test_conv2d_compiles,
    "flash_attention": test_flash_attention_compiles,
    "linear_geglu": test_linear_geglu_compiles,
    "linear_layer_norm": test_linear_layer_norm_compiles,
    "mma_gemm": "tests/kernels/linear/test_mma_gemm.py",
    "mma_conv8": "tests/kernels/eight_bits/test_conv2d8.py",
    "mma_gemm8": "tests/kernels/eight_bits/test_mma_gemm8.py",
    "mma_attention": "tests/kernels/attention/test_mma_attention_compiles.py",
    "mma_attention8": "tests/kernels/eight_bits/test_mma_attention8.py",
    "quantise_keys": "tests/kernels/eight_bits/test_mma_attention8.py",
    "query_attention": test_query_attention_compiles,
    "wgmma_conv8": "tests/kernels/eight_bits/test_wgmma_conv8.py",
    "wgmma_gemm8": "tests/kernels/eight_bits/test_wgmma_gemm8_compiles.py",
}
"""Files of csrc, and what compiles them; that of input copies is compiled beside their tests."""


# one that is quickly compiled, where it is not about the kernel
SMALL = geglu._SOURCE


def few(pack: int) -> dict[str, int]:
    return geglu.constants(pack, torch.float16, False, "none")


def test_what_was_compiled_is_kept(monkeypatch, tmp_path):
    code = SMALL.compiled(HOPPER, few(1))
    assert SMALL.compiled(HOPPER, few(8)) != code
    assert len(list((tmp_path / "kernels").iterdir())) == 2
    monkeypatch.setattr(nvrtc, "build", None)
    assert SMALL.compiled(HOPPER, few(1)) == code


@pytest.mark.parametrize(
    "spoilt", [lambda good: good[:-100], lambda good: b"", lambda good: good[:99] + b"x" + good[100:]]
)
def test_what_was_kept_and_is_spoilt_is_made_anew(spoilt, tmp_path):
    code = SMALL.compiled(HOPPER, few(8))
    (file,) = (tmp_path / "kernels").iterdir()
    good = file.read_bytes()
    file.write_bytes(spoilt(good))
    assert SMALL.compiled(HOPPER, few(8)) == code
    assert file.read_bytes() == good


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "kernels").write_text("no folder")
    kernel = nvrtc.Source("geglu", geglu._prepared, ())
    assert kernel.compiled(HOPPER, few(1))[:4] == b"\x7fELF"
    assert not kernel.kept
    (tmp_path / "kernels").unlink()
    kernel.compiled(HOPPER, few(1))
    assert kernel.kept


@pytest.fixture
def held(monkeypatch):
    """A compiler that says when it begins, and ends when it may."""
    begun, may_end = threading.Semaphore(0), threading.Event()

    def build(source, architecture, constants):
        begun.release()
        assert constants == {"N": 2} or may_end.wait(300)
        return b"code %d" % constants["N"], ""

    monkeypatch.setattr(nvrtc, "build", build)
    yield begun, may_end
    may_end.set()


def test_what_two_threads_ask_for_is_made_once(held):
    begun, may_end = held
    kernel = nvrtc.Source("flash_attention", flash_attention._prepared, ())
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(kernel.compiled, HOPPER, {"N": 1})
        assert begun.acquire(timeout=300)
        other = pool.submit(kernel.compiled, HOPPER, {"N": 1})
        assert not begun.acquire(timeout=0.5) and not other.done()
        may_end.set()
        assert one.result() == other.result() == b"code 1"
    assert not begun.acquire(blocking=False)


def test_one_compilation_does_not_wait_for_another(held):
    begun, may_end = held
    kernel = nvrtc.Source("flash_attention", flash_attention._prepared, ())
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(kernel.compiled, HOPPER, {"N": 1})
        assert begun.acquire(timeout=300)
        assert pool.submit(kernel.compiled, HOPPER, {"N": 2}).result(300) == b"code 2"
        assert not one.done()
        may_end.set()


@pytest.fixture
def loaded(monkeypatch):
    """What a stand-in of the driver was given, one after another."""
    found = []

    def load(self, index, constants, code):
        assert self._lock.locked()
        found.append(code or self.compiled(nvrtc.architecture(index), constants))
        return found[-1]

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(nvrtc.Source, "_load", load)
    return found


def test_two_variants_of_a_kernel_warm_up_side_by_side(held, loaded):
    begun, may_end = held
    kernel = nvrtc.Source("flash_attention", flash_attention._prepared, ())
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(kernel.warmup, N=n) for n in (1, 3)]
        together = [begun.acquire(timeout=300) for _ in both]
        may_end.set()
        assert all(together)
        assert [one.result() for one in both] == [b"code 1", b"code 3"]
    assert sorted(loaded) == [b"code 1", b"code 3"]
    assert not begun.acquire(blocking=False)
    assert kernel.warmup(N=1) == b"code 1" and len(loaded) == 2


def test_a_launch_does_not_wait_for_what_is_warmed_up(held, loaded):
    begun, may_end = held
    kernel = nvrtc.Source("flash_attention", flash_attention._prepared, ())
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(kernel.warmup, N=1)
        assert begun.acquire(timeout=300)
        assert pool.submit(kernel._function, 0, {"N": 2}).result(300) == b"code 2"
        assert not one.done()
        may_end.set()


def test_after_a_failure_it_may_be_tried_again(monkeypatch):
    kernel = nvrtc.Source("geglu", geglu._prepared, ())
    for _ in range(2):
        with pytest.raises(nvrtc.Unavailable):
            kernel.compiled("sm_1a", few(1))
    assert kernel.compiled(HOPPER, few(1))[:4] == b"\x7fELF"


def test_what_does_not_compile_says_why():
    with pytest.raises(nvrtc.Unavailable, match="not_a_type"):
        nvrtc.build(b"not_a_type x;", HOPPER, {})
    with pytest.raises(nvrtc.Unavailable):
        nvrtc.build(b"", "sm_1a", {})


def test_what_the_compiler_has_freed_is_given_back(monkeypatch, tmp_path):
    given = []
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(freed_memory, "give_back_of_thread", lambda: given.append(1))
    kernel = nvrtc.Source("geglu", geglu._prepared, ())
    for _ in range(2):
        kernel.compiled(HOPPER, few(1))
    # the second one is of the cache
    assert given == [1]
    with pytest.raises(nvrtc.Unavailable):
        nvrtc.build(b"not_a_type x;", HOPPER, {})
    assert given == [1, 1]


def test_a_kernel_that_failed_is_not_asked_again(monkeypatch, caplog):
    kernel = nvrtc.Source("flash_attention", flash_attention._prepared, ())
    device = torch.device("cuda", 0)
    # a driver, which is not reached
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(object(), cuda_libraries.bindings().nvrtc))
    assert kernel.supported(device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (1, 0))
    with pytest.raises(nvrtc.Unavailable):
        kernel.warmup(**constants(40))
    assert not kernel.supported(device)
    assert kernel.supported(torch.device("cuda", 1))
    assert "flash_attention.cu is not used" in caplog.text


@pytest.mark.parametrize("found", [Bindings(object(), None), Bindings(None, object()), Bindings(None, None)])
def test_without_nvrtc_or_a_driver_there_is_no_kernel(monkeypatch, found):
    monkeypatch.setattr(nvrtc, "bindings", lambda: found)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (9, 0))
    assert not flash_attention._SOURCE.supported(torch.device("cuda", 0))
    if found.driver is None:
        with pytest.raises(nvrtc.Unavailable, match="driver was not found"):
            nvrtc.loaded_driver()
    if found.nvrtc is None:
        with pytest.raises(nvrtc.Unavailable):
            nvrtc.loaded_nvrtc()


@pytest.mark.gpu
def test_loaded_in_a_thread_that_has_no_context_yet():
    kernel = nvrtc.Source("flash_attention", flash_attention._prepared, ())
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(kernel.warmup, **constants(64)).result() is not None


def test_what_a_launch_hands_over(monkeypatch):
    """Addresses of tensors, null for None, and numbers as they are."""
    handed = []

    def launched(function, *rest):
        table = (ctypes.c_void_p * 3).from_address(rest[-1])
        handed.append([ctypes.c_uint64.from_address(place).value for place in table[:2]])
        handed.append(ctypes.c_int.from_address(table[2]).value)

    tensor = torch.ones(3)
    source = nvrtc.Source("none", lambda *args: ([*args, ctypes.c_int(7)], 128, 0), ())
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(SimpleNamespace(cuLaunchKernel=launched), None))
    monkeypatch.setattr(source, "_function", lambda index, constants: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(nvrtc, "current_stream", lambda index: 0)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (8, 9))
    source[(1,)](tensor, None)
    assert handed == [[tensor.data_ptr(), 0], 7]


def test_each_thread_is_given_the_context_of_its_gpu(monkeypatch):
    given = []
    driver = SimpleNamespace(
        cuDeviceGet=lambda index: f"GPU {index}",
        cuDevicePrimaryCtxRetain=lambda device: f"context of {device}",
        cuCtxSetCurrent=lambda context: given.append((threading.get_ident(), context)),
    )
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(driver, None))
    monkeypatch.setattr(nvrtc, "_bound", threading.local())
    for index in (0, 0, 1, 1, 0):
        nvrtc.bind(index)
    here = threading.get_ident()
    assert given == [(here, f"context of GPU {index}") for index in (0, 1, 0)]
    other = threading.Thread(target=nvrtc.bind, args=(0,))
    other.start()
    other.join()
    assert len(given) == 4 and given[3][0] != here
