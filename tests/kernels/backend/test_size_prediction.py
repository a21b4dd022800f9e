"""What further sizes of image may ask for is compiled ahead too; stand-ins of NVRTC and a driver are enough."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.support import finish
from sfast_ext import kernels
from sfast_ext.kernels.attention import flash_attention, query_attention
from sfast_ext.kernels.backend import nvrtc, precompile, triton_runtime
from sfast_ext.kernels.backend.cuda_libraries import Bindings
from sfast_ext.kernels.conv import conv2d
from sfast_ext.kernels.linear import linear_geglu

from .test_precompile import GPU, NORMED, graph_of

pytestmark = pytest.mark.skipif(
    not triton_runtime.AVAILABLE or kernels.interpreted(), reason="needs Triton, and TRITON_INTERPRET unset"
)


def unet(side):
    """Parts of one, for two images of 16 side by 16 side pixels."""
    return graph_of(
        (conv2d.launch, (2, 1280, side, side), (1280, 1280, 3, 3)),
        (conv2d.launch, (2, 640, 2 * side, 2 * side), (640, 640, 3, 3)),
        (linear_geglu.launch, (2, 4 * side * side, 640), (5120, 640), (5120,)),
        (linear_geglu.launch, (2, side * side, 1280), (10240, 1280), (10240,)),
    )


def asked_by(graph):
    return [launch.constants for launch in precompile.launches(graph, GPU).values()]


def test_a_further_size_finds_its_kernels_compiled(nvrtc_calls):
    first, *further = (unet(side) for side in (32, 24, 33, 40, 48, 65))
    others = {str(given) for graph in further for given in asked_by(graph) if given not in asked_by(first)}
    assert len(others) >= 4
    assert precompile.precompile(first, GPU) == len(asked_by(first))
    finish()
    compiled = list(nvrtc_calls.asked)
    names = {str(given) for given in compiled}
    families = [(conv2d if "PINGPONG" in given else linear_geglu).variants(given) for given in asked_by(first)]
    assert others < names == {str(given) for family in families for given in family}
    assert len(names) == len(compiled)
    assert sum(precompile.precompile(graph, GPU) for graph in further) == len(others)
    finish()
    assert nvrtc_calls.asked == compiled


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("gate_first", [False, True])
def test_any_tile_of_a_geglu_has_the_others_as_siblings(dtype, approximate, gate_first):
    every = [linear_geglu.constants(tile, dtype, gate_first, approximate) for tile in linear_geglu.TILES]
    assert all(linear_geglu.variants(given) == every for given in every)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", flash_attention.SHAPES)
def test_any_shape_of_an_attention_has_as_siblings_what_further_sizes_ask_for(monkeypatch, size, dtype):
    monkeypatch.setattr(flash_attention, "multiprocessors", lambda device: 132)
    queries = [torch.empty(images, 8, n, size, device="meta") for images in (1, 2, 16) for n in range(256, 9216, 128)]
    asked = [flash_attention.constants(size, flash_attention.best(q, q), dtype) for q in queries]
    for given in asked:
        siblings = flash_attention.variants(given)
        assert all(other in siblings for other in asked) and len(siblings) == len(flash_attention.SHAPES[size])
    assert len({str(given) for given in asked}) == len(flash_attention.SHAPES[size])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_queries_and_their_attention_ask_for_the_same_at_any_size(monkeypatch, nvrtc_calls, dtype):
    monkeypatch.setattr(query_attention, "multiprocessors", lambda device: 132)
    asked = []
    for images, rows, heads in ((2, 1024, 20), (2, 4096, 10), (2, 988, 20), (2, 9216, 10), (8, 1024, 20)):
        keys = (images, heads, 77, 64)
        graph = graph_of((query_attention.launch, (images, rows, 64 * heads), (64 * heads, 64 * heads), keys, keys))
        for node in graph.nodes:
            if "val" in node.meta:
                node.meta["val"] = node.meta["val"].to(dtype)
        asked += asked_by(graph)
    given = query_attention.constants(dtype)
    assert asked == [given] * 5 and query_attention.variants(given) == [given]


def family(count=5):
    """A kernel whose constants are all those of another size."""
    return nvrtc.Source("conv2d", lambda: ([], 0, 0), (), lambda given: [{"N": n} for n in range(count)])


def numbers(nvrtc_calls):
    return [constants["N"] for constants in nvrtc_calls.asked]


def add(source, *given):
    precompile._background.add([precompile.Launch(source, (), {"N": n}) for n in given], GPU)


def test_siblings_are_compiled_once_and_not_what_was_asked_for(nvrtc_calls, monkeypatch):
    source = family()
    add(source, 2, 3)
    finish()
    assert numbers(nvrtc_calls) == [0, 1, 4]
    assert not source._functions  # nothing was loaded
    started = []
    monkeypatch.setattr(precompile.BackgroundCompiler, "_work", lambda self: started.append(self))
    add(source, 2)
    add(source, 4)
    assert started == []


def test_there_is_a_thread_only_while_there_is_work(nvrtc_calls):
    add(family(3), 0)
    finish()
    assert precompile._background._thread is None
    add(family(6), 0)
    finish()
    assert precompile._background._thread is None
    assert numbers(nvrtc_calls) == [1, 2, 3, 4, 5]


def test_what_the_cache_has_is_not_compiled(nvrtc_calls):
    family().compiled("sm_90a", {"N": 3})
    add(family(), 0)
    finish()
    assert numbers(nvrtc_calls) == [3, 1, 2, 4]


def test_what_does_not_compile_keeps_nothing_else_from_it(nvrtc_calls, caplog):
    def answer(constants):
        if constants["N"] == 1:
            raise nvrtc.Unavailable("no such instruction")
        return b"code"

    source, nvrtc_calls.answer = family(), answer
    add(source, 0)
    finish()
    assert numbers(nvrtc_calls) == [1, 2, 3, 4]
    assert source.supported(GPU)
    assert not caplog.records  # of warnings or worse


def test_what_cannot_be_kept_is_not_compiled(nvrtc_calls, tmp_path):
    (tmp_path / "kernels").write_text("no folder")
    add(family(), 0)
    finish()
    assert numbers(nvrtc_calls) == [1]
    nvrtc_calls.asked.clear()
    first = precompile.precompile(unet(32), GPU)  # which is told so
    finish()
    assert len(nvrtc_calls.asked) == first == len(asked_by(unet(32)))


def test_where_the_main_thread_has_ended_nothing_more_is_compiled(nvrtc_calls, monkeypatch):
    def answer(constants):
        monkeypatch.setattr(threading, "main_thread", lambda: SimpleNamespace(is_alive=lambda: False))
        return b"code"

    nvrtc_calls.answer = answer
    add(family(), 0)
    finish()
    assert numbers(nvrtc_calls) == [1]


def test_python_ends_after_the_compilation_at_hand(tmp_path):
    script = """
        import threading, time
        import torch
        from sfast_ext.kernels.backend import cuda_libraries, nvrtc, precompile
        begun = threading.Event()
        class Nvrtc:
            version = lambda self: (13, 0)
        def build(*args):
            print("begun", flush=True)
            begun.set()
            while threading.main_thread().is_alive():  # ends beside this compilation
                time.sleep(0.01)
            print("done", flush=True)
            return b"code", ""
        nvrtc.bindings, nvrtc.build = lambda: cuda_libraries.Bindings(object(), Nvrtc()), build
        torch.cuda.get_device_capability = lambda index: (9, 0)
        source = nvrtc.Source("conv2d", None, (), lambda given: [{"N": n} for n in range(100)])
        launch = precompile.Launch(source, (), {"N": 0})
        precompile._background.add([launch], torch.device("cuda", 0))
        begun.wait()
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "SFAST_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0 and not ran.stderr
    assert ran.stdout.split() == ["begun", "done"]


def test_what_a_daemon_started_is_none(nvrtc_calls):
    release = threading.Event()
    nvrtc_calls.answer = lambda constants: release.wait(300) and b"code"
    starter = threading.Thread(target=add, args=(family(), 0), daemon=True)
    starter.start()
    starter.join()
    thread = precompile._background._thread
    assert thread.is_alive() and not thread.daemon
    release.set()


def test_where_nothing_was_compiled_no_thread_is_started(nvrtc_calls, monkeypatch):
    def broken(constants):
        raise nvrtc.Unavailable("no such instruction")

    started = []
    monkeypatch.setattr(precompile.BackgroundCompiler, "_work", lambda self: started.append(self))
    assert precompile.precompile(unet(32), torch.device("cpu")) == 0
    assert precompile.precompile(graph_of((torch.add, NORMED, NORMED)), GPU) == 0
    nvrtc_calls.answer = broken
    assert precompile.precompile(unet(32), GPU) == 0
    monkeypatch.setattr(nvrtc, "bindings", lambda: Bindings(None, None))
    monkeypatch.setattr(precompile, "_compile", lambda *args, **more: False)  # Triton's, which a GPU would do
    assert precompile.precompile(unet(24), GPU) == 0
    assert started == [] and precompile._background._thread is None
