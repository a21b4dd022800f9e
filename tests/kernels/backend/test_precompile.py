"""Compiling ahead, which needs no card: a stand-in of Triton's driver names one."""

from __future__ import annotations

import contextlib
import importlib
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import fx

from kernels.support import finish
from sfast_ext import environment, freed_memory, kernels
from sfast_ext.kernels.attention import attention
from sfast_ext.kernels.backend import nvrtc, precompile, triton_runtime
from sfast_ext.kernels.group_norm import group_norm, one_pass
from sfast_ext.kernels.pointwise import bias_add, geglu, layer_norm

pytestmark = pytest.mark.skipif(
    not triton_runtime.AVAILABLE or kernels.interpreted(), reason="needs Triton, and TRITON_INTERPRET unset"
)

OLDER = triton_runtime.AVAILABLE and int(triton_runtime.triton.__version__.split(".")[0]) < 3
GPU = torch.device("cuda", 0)
FUNCTIONS = (layer_norm.layer_norm_kernel, geglu.geglu_kernel, bias_add.bias_add_kernel)
KERNELS = (*FUNCTIONS, one_pass.group_norm_one_pass_kernel)
NORMED, IMAGE = (2, 64, 320), (2, 320, 8, 8)


def graph_of(*calls):
    """A graph of calls, whose tensors are given by their shapes."""
    graph = fx.Graph()
    for function, *args in calls:
        nodes = []
        for arg in args:
            if isinstance(arg, tuple):
                node = graph.placeholder("x")
                node.meta["val"] = torch.empty(arg, dtype=torch.float16, device="meta")
                arg = node
            nodes.append(arg)
        graph.call_function(function, tuple(nodes))
    return graph


def network():
    return graph_of(
        (layer_norm.launch, NORMED, (320,), (320,), 1e-5),
        (layer_norm.launch, (2, 128, 320), (320,), (320,), 1e-5),  # as the first: rows are told at run time
        (layer_norm.launch, (2, 64, 640), (640,), (640,), 1e-5),
        (layer_norm.launch, (2, 64, 641), (641,), (641,), 1e-5),  # no multiple of 16
        (geglu.launch, (2, 64, 2560)),
        (bias_add.launch, IMAGE, (320,), IMAGE),
        (group_norm.launch, IMAGE, 32, (320,), (320,), 1e-5),
        (attention.launch, (2, 4, 64, 64), (2, 4, 64, 64), (2, 4, 64, 64)),
        (torch.add, NORMED, NORMED),
    )


def test_launches_that_share_a_compilation_are_one():
    found = precompile.launches(network())
    names = sorted(launch.kernel.fn.__module__.rpartition(".")[2] for launch in found.values())
    assert names == ["bias_add", "geglu", "layer_norm", "layer_norm", "layer_norm", "one_pass", "two_pass"]


def test_a_node_without_metadata_is_left_out():
    graph = graph_of((geglu.launch, (2, 64, 2560)), (layer_norm.launch, NORMED, (320,), (320,), 1e-5))
    next(iter(graph.nodes)).meta.clear()
    assert [launch.kernel for launch in precompile.launches(graph).values()] == [layer_norm.layer_norm_kernel]


def test_nothing_is_launched_or_kept_if_launches_are_collected():
    x = torch.empty(4, 16, device="meta")
    with triton_runtime.dry_run() as collected:
        layer_norm.launch(x, None, None, 1e-5)
    assert len(collected) == 1
    assert triton_runtime.accepts(x)


def test_other_threads_launch_while_one_collects():
    seen = []
    with triton_runtime.dry_run():
        thread = threading.Thread(target=lambda: seen.append(triton_runtime.accepts(torch.empty(4, 16))))
        thread.start()
        thread.join()
    assert seen == ["no GPU of compute capability 7.0 or later"]


def caches(kernel):
    """What Triton keeps compilations of a kernel in, by device."""
    return kernel.device_caches if hasattr(kernel, "device_caches") else kernel.cache


def kept(kernel):
    """What tells compilations of a kernel apart, on the card."""
    found = caches(kernel)[0]
    return set(found[0] if isinstance(found, tuple) else found)


def fuses(kernel):
    """Whether all that was compiled of a kernel is to fuse products and sums."""
    found = caches(kernel)[0]
    return all(each.metadata.enable_fp_fusion for each in (found[0] if isinstance(found, tuple) else found).values())


def newer(monkeypatch, loaded):
    """Triton from 3.0 on, which compiles without a card for the one that a driver names."""
    compiler = importlib.import_module("triton.backends.compiler")
    driver = importlib.import_module("triton.runtime.driver").driver
    active = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: compiler.GPUTarget("cuda", 90, 32),
    )
    # what has no setter, since 3.4, reads the other
    monkeypatch.setattr(driver, "_active" if "_active" in vars(driver) else "active", active)
    compiled = importlib.import_module("triton.compiler.compiler").CompiledKernel
    monkeypatch.setattr(compiled, "_init_handles", lambda self: loaded.append(self.name))


def older(monkeypatch, loaded):
    """Triton before, which compiles what starts a kernel with the kernel, and for that needs the driver's library."""

    def compiled(*args, **options):
        return SimpleNamespace(_init_handles=lambda: loaded.append(args))

    monkeypatch.setattr(importlib.import_module("triton.compiler"), "compile", compiled)
    names = {"get_current_device": lambda: 0, "get_current_stream": lambda device: 0, "set_current_device": id}
    jit = importlib.import_module("triton.runtime.jit")
    if hasattr(jit, "driver"):
        driver = SimpleNamespace(**names, get_current_target=lambda: ("cuda", 90))
        monkeypatch.setattr(jit, "driver", driver)
        return
    for kernel in KERNELS:
        for name, function in names.items():
            monkeypatch.setitem(kernel.run.__globals__, name, function)
        monkeypatch.setattr(kernel, "_conclude_device_type", lambda types, pinned: "cuda")


@pytest.fixture
def card(monkeypatch, tmp_path):
    """Triton as on a GPU of compute capability 9.0, with nothing compiled."""
    loaded = []
    (older if OLDER else newer)(monkeypatch, loaded)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(precompile, "_done", set())
    monkeypatch.setattr(precompile, "_PAUSE", 0)
    monkeypatch.setattr(precompile, "_background", precompile.BackgroundCompiler())
    for kernel in KERNELS:
        caches(kernel).clear()
    yield loaded
    finish()
    for kernel in KERNELS:
        caches(kernel).clear()


def small():
    return graph_of(
        (layer_norm.launch, NORMED, (320,), (320,), 1e-5),
        (geglu.launch, (2, 64, 2560)),
        (bias_add.launch, IMAGE, (320,), IMAGE),
    )


@pytest.mark.filterwarnings("error:.*DEFAULT_FP_FUSION")
@pytest.mark.parametrize("early", [False, True])
def test_what_is_compiled_ahead_is_what_a_launch_looks_for(card, monkeypatch, early):
    if early and not triton_runtime.HAS_PDL:
        pytest.skip("needs Triton 3.5")
    monkeypatch.setattr(triton_runtime, "pdl_enabled", lambda device: early and device.type == "cuda")
    assert precompile.precompile(small(), GPU) == 3 == len(card)

    def compiled():
        return {function: kept(function) for function in FUNCTIONS}

    if not OLDER:
        assert all(fuses(function) for function in FUNCTIONS)
    before = compiled()
    assert all(len(keys) == 1 for keys in before.values())
    calls = [
        (layer_norm.launch, [torch.zeros(NORMED), torch.zeros(320), torch.zeros(320)], [1e-5]),
        (geglu.launch, [torch.zeros(2, 64, 2560)], []),
        (bias_add.launch, [torch.zeros(IMAGE), torch.zeros(320), torch.zeros(IMAGE)], []),
    ]
    for function, tensors, rest in calls:
        with triton_runtime.dry_run(GPU) as collected:
            function(*[t.half() for t in tensors], *rest)
        for kernel, args, constants, _ in collected:
            assert constants["PDL"] == early == constants.get("launch_pdl", False)
            kernel.warmup(*args, grid=(1,), **constants)  # a launch but for the launching
    assert compiled() == before


@pytest.mark.skipif(OLDER, reason="Triton makes what starts a kernel apart from the kernel from 3.0 on")
def test_what_a_further_size_launches_is_compiled_but_not_loaded(card, monkeypatch):
    driver, launchers = importlib.import_module("triton.runtime.driver").driver, []
    monkeypatch.setattr(driver.active, "launcher_cls", lambda src, metadata: launchers.append(src), raising=False)

    def images(*sides):
        return graph_of(*[(group_norm.launch, (2, 1280, side, side), 32, None, None, 1e-5) for side in sides])

    assert precompile.precompile(images(8), GPU) == 1 == len(card)
    finish()
    compiled = kept(one_pass.group_norm_one_pass_kernel)
    assert len(compiled) == 2 and len(card) == 1
    (src,) = launchers  # of the one that was not loaded
    assert src.fn is one_pass.group_norm_one_pass_kernel
    for launch in precompile.launches(images(8, 16), GPU).values():
        launch.kernel.warmup(*launch.args, grid=(1,), **launch.constants)
    assert kept(one_pass.group_norm_one_pass_kernel) == compiled
    assert precompile.precompile(images(16), GPU) == 1  # loads it
    assert len(card) == 2


def test_a_second_graph_compiles_only_what_is_new(card):
    precompile.precompile(small(), GPU)
    more = graph_of((geglu.launch, (2, 64, 2560)), (layer_norm.launch, (2, 64, 640), (640,), (640,), 1e-5))
    assert precompile.precompile(more, GPU) == 1


def test_what_fails_to_compile_is_left_to_the_launch(card, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(geglu.geglu_kernel, "warmup", broken, raising=False)
    assert precompile.precompile(small(), GPU) == 2


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_was_in_another_threads_way_is_compiled_after_all(card, monkeypatch, wrapped):
    warmup, tries = geglu.geglu_kernel.warmup, []
    disturbance = SystemError("AST constructor recursion depth mismatch (before=45, after=164)")

    def disturbed(*args, **options):
        tries.append(threading.current_thread())
        if len(tries) > 1:
            return warmup(*args, **options)
        if wrapped:
            raise RuntimeError("at 25:11") from disturbance
        raise disturbance

    monkeypatch.setattr(geglu.geglu_kernel, "warmup", disturbed, raising=False)
    assert precompile.precompile(small(), GPU) == 3
    assert len(tries) == 2 and tries[1] is threading.current_thread()


def test_each_thread_gives_back_what_the_compiler_has_freed(card, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("no such instruction")

    given = []
    monkeypatch.setattr(freed_memory, "give_back_of_thread", lambda: given.append(threading.current_thread()))
    monkeypatch.setattr(geglu.geglu_kernel, "warmup", broken, raising=False)
    assert precompile.precompile(small(), GPU) == 2
    finish()
    # in the compiler's own threads, after one that fails too
    assert len(given) >= 3 and threading.current_thread() not in given


def test_without_a_gpu_nothing_is_compiled():
    assert precompile.precompile(small(), torch.device("cpu")) == 0


def test_triton_hashes_itself_beside_the_model_load(monkeypatch):
    hashed = []
    precompile.get_ready.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert precompile.get_ready(environment.triton_runs_on) is None
    precompile.get_ready.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    homes = [importlib.import_module(home) for home in ("triton.runtime.cache", "triton.compiler.compiler")]
    homes = [module for module in homes if hasattr(module, "triton_key")]
    for module in homes:
        monkeypatch.setattr(module, "triton_key", lambda: hashed.append(threading.current_thread()))
    thread = precompile.get_ready(environment.triton_runs_on)
    assert precompile.get_ready(environment.triton_runs_on) is thread  # once in a process
    thread.join()
    assert set(hashed) == ({thread} if homes else set())
    precompile.get_ready.cache_clear()


@pytest.mark.parametrize(
    ("available", "runs", "card", "loaded"),
    [(False, False, 8, 1), (True, False, 8, 1), (True, True, 8, 0), (True, True, 9, 1)],
)
def test_nvrtc_is_loaded_beside_the_model_load_if_its_kernels_will_run(monkeypatch, available, runs, card, loaded):
    calls = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(triton_runtime, "AVAILABLE", available)
    monkeypatch.setattr(triton_runtime, "capability", lambda device: (card, 0))
    monkeypatch.setattr(nvrtc, "bindings", lambda: calls.append(1))
    precompile._load_compilers(lambda device: runs)
    assert len(calls) == loaded


@pytest.mark.gpu
def test_a_run_after_it_compiles_nothing(monkeypatch):
    knobs = pytest.importorskip("triton.knobs")
    device = torch.device("cuda", torch.cuda.current_device())
    compiled = []
    monkeypatch.setattr(precompile, "_done", set())
    monkeypatch.setattr(precompile.BackgroundCompiler, "add", lambda *given: None)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **details: compiled.append(details["repr"]))
    calls = [
        (layer_norm.launch, [(3, 77, 352), (352,), (352,)], [1e-5]),
        (geglu.launch, [(3, 77, 704)], []),
        (bias_add.launch, [(3, 352, 9, 9), (352,), (3, 352, 9, 9)], []),
        (group_norm.launch, [(3, 352, 9, 9)], [32, None, None, 1e-5]),
    ]
    graph = graph_of(*[(function, *shapes, *rest) for function, shapes, rest in calls])
    assert precompile.precompile(graph, device) == 5
    compiled.clear()
    for function, shapes, rest in calls:
        function(*[torch.zeros(shape, dtype=torch.float16, device=device) for shape in shapes], *rest)
    assert compiled == []
