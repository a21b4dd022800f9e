"""Fixtures for all tests."""

from __future__ import annotations

# first: what is imported later may keep a clock under a name of its own
import coarse_clock.sitecustomize  # noqa: F401  # isort: skip

import contextlib
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import logging
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import needs
import pairs
import pytest

# torch is imported where it is used: a process that only leads workers is seconds earlier without it
if TYPE_CHECKING:
    from torch import nn

GRADIOS = ("SFAST_GRADIO_PYTHON",)
WEBUIS = (
    "SFAST_A1111_DIR",
    "SFAST_SDNEXT_DIR",
    "SFAST_FORGE_DIR",
    "SFAST_FORGE_CLASSIC_DIR",
    "SFAST_FORGE_OLD_DIR",
    "SFAST_REFORGE_DIR",
)
_BEGAN = pytest.StashKey[float]()
_LEFT = pytest.StashKey[dict[str, int]]()
_NUMBER = pytest.StashKey[int]()
LONG = pytest.StashKey[dict[str, bool]]()
"""Whether a case is `long`, by its id."""

_KEPT = 2 << 30
"""Bytes that a worker may keep on the GPU after a test: the others need the rest."""

_LEFT_OBJECTS = 100_000
"""That files of tests may leave until they are frozen."""

_TESTING = frozenset({"_pytest", "pluggy", "pytest", "xdist"})
"""Their code is in each assertion of a test, and leads to all tests of a session and what became of them."""

_MANY = 500
_LATE = ("diffusers.models.unets.unet_2d_condition", "diffusers.models.autoencoders.autoencoder_kl", "torch._dynamo")
"""A million objects that some test imports, among so many tests."""


def pytest_configure(config: pytest.Config) -> None:
    # otherwise a process that only leads workers; with -n 0 there are none
    if not config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        _prepare_process()


def _prepare_process() -> None:
    import torch

    # a test makes and drops as many objects as a host in hours: all of them were looked at every second or so. Captures
    # collect the oldest ones themselves
    gc.set_threshold(10_000, 10, 100)
    # pytest listens to loggers that do not propagate: torch would describe each tensor of a capture to it, with a stack
    logging.getLogger("torch.__trace").propagate = True
    # several workers share the cores; a model this small gains nothing from more threads
    torch.set_num_threads(1)
    # nor in processes that tests start; threads that spin while they wait double what those cost
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what would begin after `SFAST_TEST_SECONDS`, counted from the first test of the process."""
    limit = os.environ.get("SFAST_TEST_SECONDS")
    if limit:
        since = time.monotonic() - item.config.stash.setdefault(_BEGAN, time.monotonic())
        if since > float(limit):
            pytest.skip(f"did not begin within {limit} s: make test runs it")


def pytest_report_header() -> str:
    """The versions that a run is of."""
    versions = []
    for name in ("torch", "triton", "diffusers", "numpy", "cuda-bindings"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    step = getattr(time, "sfast_test_clock_step", None)
    clocks = [f"clocks in steps of {1e3 * step:g} ms"] if step is not None else []
    return "\n".join([", ".join(versions), *clocks, *needs.missing()])


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Tests of real WebUIs are collected if a WebUI is named, those of small pages if a Gradio is, and all if
    one of their files is asked for."""
    needs = {"live": WEBUIS, "pages": GRADIOS}.get(collection_path.parent.name)
    test = needs is not None and collection_path.name.startswith("test_")
    return True if test and not any(map(os.environ.get, needs or ())) else None


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Each case of a test has its number."""
    found = yield
    for number, item in enumerate(found if isinstance(found, list) else ()):
        item.stash[_NUMBER] = number
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what runs elsewhere, and counts it for the summary."""
    config.stash[LONG] = {item.nodeid: is_long(item) for item in items}
    here, elsewhere, left = [], [], Counter[str]()
    for item in items:
        reason = left_out(item)
        if reason is None:
            here.append(item)
        else:
            elsewhere.append(item)
            left[reason] += 1
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = here
    config.stash[_LEFT] = dict(left)
    if hasattr(config, "workeroutput"):
        config.workeroutput["elsewhere"] = dict(left)


def left_out(item: pytest.Item) -> str | None:
    """Where a test runs that cannot run here, or None."""
    import torch

    from sfast_ext import kernels

    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        return "need an NVIDIA GPU: pytest -m gpu"
    if item.get_closest_marker("gpu") is not None and kernels.interpreted():
        return "need an NVIDIA GPU and TRITON_INTERPRET unset: pytest -m gpu"
    if item.get_closest_marker("interpreter") is not None and not kernels.interpreted():
        return "run in Triton's interpreter: TRITON_INTERPRET=1 pytest -m interpreter tests/kernels"
    if item.get_closest_marker("gpu") is not None or os.environ.get("SFAST_ALL_CASES"):
        return None
    if is_long(item):
        return "are long: make test-long, or SFAST_ALL_CASES=1"
    thinned = item.get_closest_marker("thinned")
    if thinned is not None:
        case, counts = place_of(item)
        if case not in pairs.places(counts, **together(thinned, item)):
            return "have parameters whose values, or pairs of them, run in other cases: SFAST_ALL_CASES=1"
    return None


def is_long(item: pytest.Item) -> bool:
    """Whether a mark `long` is of this test, and not `but` of this case."""
    name = item.name.partition("[")[0]
    return any(
        (not mark.args or name in mark.args) and item.stash.get(_NUMBER, 0) not in mark.kwargs.get("but", ())
        for mark in item.iter_markers("long")
    )


def together(thinned: pytest.Mark, test: Any) -> dict[str, Any]:
    """What `pairs.places` is given by `thinned("one", "other", turn=1)`, whose parameters are named by their first."""
    marks = test.iter_markers("parametrize") if hasattr(test, "iter_markers") else test.pytestmark
    first = [names_of(mark)[0] for mark in marks if mark.name == "parametrize"]
    return {"together": tuple(map(first.index, thinned.args)), **thinned.kwargs}


def names_of(mark: pytest.Mark) -> list[str]:
    """The parameters of a `parametrize`."""
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def place_of(item: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each `parametrize` of a test, the place of the case's values among all, and how many there are.
    `callspec.indices` of pytest 8 and later has the place of the whole case in their stead."""
    place, counts, given = [], [], item.callspec.params
    for mark in item.iter_markers("parametrize"):
        names, values = names_of(mark), mark.args[1]
        # what pytest.param made has marks
        cases = [each.values if hasattr(each, "marks") else each if len(names) > 1 else (each,) for each in values]
        same = (all(given[n] is part or given[n] == part for n, part in zip(names, parts)) for parts in cases)
        place.append(list(same).index(True))
        counts.append(len(cases))
    return tuple(place), tuple(counts)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    from sfast_ext import gc_pause, kernels
    from sfast_ext.capture import reachable

    # networks of many tests together are large: what a test thaws is frozen again all the same
    gc_pause.LARGE = 1 << 60
    # a forward with an assertion is recorded, as it would be in a program, without a walk through tens of thousands of
    # objects of pytest for state that it may change
    reachable._LIBRARIES |= _TESTING
    # what was imported stays: the garbage collector need not look at it again. Kernels in the interpreter import none
    if len(session.items) > _MANY and not kernels.interpreted():
        for name in _LATE:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # what the tests of a file leave behind stays as well: modules, and networks that are made once. Each collection
    # that a test asks for would look at it again
    # (Python needs 0.1 s to say how many objects are frozen)
    last = nextitem is not None and nextitem.path != item.path
    if last and len(gc.get_objects(generation=2)) > _LEFT_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    # nor, at the end, five times at all that pytest and imported modules still hold
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each worker collects the same tests: the last one tells."""
    node.config.stash[_LEFT] = getattr(node, "workeroutput", {}).get("elsewhere", {})


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What was left out, in a line each."""
    left = config.stash.get(_LEFT, {})
    if not any(map(os.environ.get, WEBUIS)):
        left = {**left, f"tests/hosts/live starts real WebUIs: set {' or '.join(WEBUIS)}": 0}
    if not any(map(os.environ.get, GRADIOS)):
        left = {**left, "tests/pages needs the WebUIs' Gradios: make test, or make test-pages with a browser": 0}
    for reason, count in left.items():
        terminalreporter.write_line(f"not run here: {f'{count} tests ' if count else ''}{reason}")


@pytest.fixture(autouse=True)
def gigabytes(request: pytest.FixtureRequest) -> Iterator[None]:
    """For a test marked `gpu(gigabytes=24)`: such a GPU, of which nothing is kept from the other workers after it. Of
    other tests on a GPU little is kept."""
    import torch
    from filelock import FileLock

    marker = request.node.get_closest_marker("gpu")
    needed = marker.kwargs.get("gigabytes", 0) if marker else 0
    if not needed:
        yield
        if marker is not None and torch.cuda.memory_reserved() > _KEPT:
            _give_back()
        return
    if torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory < needed << 30:
        pytest.skip(f"needs a GPU of {needed} GB")
    # one after another: two of them and the other workers do not fit in 80 GB
    with FileLock(Path(tempfile.gettempdir()) / "stable-fast-gigabytes.lock"):
        yield
        _give_back()


def _give_back() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans launch kernels, which on a CPU compute what their references do; none is disabled."""
    from sfast_ext import environment
    from sfast_ext.kernels.backend import health

    monkeypatch.setattr(environment, "triton_runs_on", lambda device: True)
    health.clear()
    yield
    health.clear()


@pytest.fixture
def tiny_unet() -> Callable[..., nn.Module]:
    """`tiny_unet(name="sd15", seed=0)`: a fresh copy of a tiny UNet, built once for each worker."""
    from sfast_ext.tools.lib import models

    return models.tiny_unet


@pytest.fixture
def two_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called tiny-sd15 has two levels, for tests that are not about the model."""
    from sfast_ext.tools.lib import models

    shape = {
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    monkeypatch.setitem(models._TINY, "sd15", {**models._TINY["sd15"], **shape})
    monkeypatch.setattr(models, "_tiny_unet", functools.lru_cache(models._tiny_unet.__wrapped__))


@pytest.fixture
def unet_inputs() -> Callable[..., tuple]:
    """`unet_inputs(unet, width, height, images)`: positional and keyword arguments of one call under guidance."""
    from sfast_ext.tools.lib import models

    return models.unet_inputs


@pytest.fixture
def xformers() -> Iterator[ModuleType]:
    """A stand-in of xformers, imported as a host does."""
    from foreign import imported, takes_its_place

    if not takes_its_place("xformers"):
        pytest.skip("xformers itself is installed, and torch takes operations of that name once")
    with imported("xformers", "ops") as module:
        yield module


@pytest.fixture
def flash() -> Iterator[ModuleType]:
    """The functions of a stand-in of flash_attn; `calls` are those of its extension."""
    from foreign import imported

    with imported("flash_attn", "flash_attn_interface") as module:
        module.flash_attn_interface.calls.clear()
        yield module.flash_attn_interface


@pytest.fixture
def sage() -> Iterator[ModuleType]:
    """The functions of a stand-in of SageAttention, and their `calls`."""
    from foreign import imported

    with imported("sageattention", "core") as module:
        module.core.calls.clear()
        yield module.core


@pytest.fixture
def vae_plans_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of VAEs are made at the second call of their kind: a tiny VAE's calls never cost as much as a plan."""
    from sfast_ext.hosts import vae

    monkeypatch.setattr(vae, "GAIN", math.inf)


@pytest.fixture
def text_plans_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for text encoders."""
    from sfast_ext.hosts import text_encoders

    monkeypatch.setattr(text_encoders, "GAIN", math.inf)
