"""Objects of a WebUI's start, which garbage collections leave alone.

These tests thaw all objects of their process: `test_startup_objects.py` runs them in one that has few.
"""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from hosts.standins.sdnext import Host, hosted, pipeline
from hosts.standins.worlds import kinds, world_of
from sfast_ext import gc_pause
from sfast_ext.hosts.webui_session import WebUISession

fastapi = pytest.importorskip("fastapi")
pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def loaded() -> Iterator[int]:
    """Bytes of the networks that other tests have loaded."""
    gc.unfreeze()
    gc.collect()
    yield gc_pause.parameter_bytes(gc.get_objects())
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def thawed(loaded: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process if nobody has frozen anything, nor loaded a network."""
    monkeypatch.setattr(gc_pause, "LARGE", loaded)
    monkeypatch.setattr(gc_pause, "_seen_frozen", False)
    yield
    gc.unfreeze()


@pytest.fixture
def collected() -> Iterator[None]:
    """What a test loads is gone for the next: a network's hooks make cycles."""
    yield
    gc.collect()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    yield from hosted(monkeypatch)


class Ring:
    def __init__(self) -> None:
        self.own = self


def start(host: Host) -> None:
    host.script_callbacks.fire("app_started", None, fastapi.FastAPI())


def test_a_collection_visits_what_came_after_the_start(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    count = gc.get_freeze_count
    # of Python 3.12
    monkeypatch.setattr(gc, "get_freeze_count", lambda: count() + 375)
    before = len(gc.get_objects())
    held = Ring()
    early, kept = weakref.ref(held), weakref.ref(held)
    start(host)
    assert gc.get_freeze_count() > 0.9 * before and len(gc.get_objects()) < 0.1 * before
    late = weakref.ref(Ring())
    del held
    gc.collect()
    assert late() is None and early() is kept() is not None
    # as if the page is made anew
    host.script_callbacks.fire("script_unloaded")
    assert count() == 0
    gc.collect()
    assert early() is None


def test_what_nothing_refers_to_is_freed_as_before(host: Host) -> None:
    tensor = torch.zeros(9)
    holder = [tensor]
    gone = weakref.ref(tensor)
    start(host)
    del tensor, holder
    assert gone() is None


def test_a_model_that_is_loaded_at_the_start_is_not_frozen(collected: None, host: Host) -> None:
    host.sd_models.load_model(pipeline())
    start(host)
    assert gc.get_freeze_count() == 0 and "a network is loaded already" in str(host.status()["events"])
    host.modeldata.model_data.sd_model = None


def test_switched_off_it_leaves_python_alone(host: Host) -> None:
    host.opts.sfast_enabled = False
    start(host)
    assert gc.get_freeze_count() == 0


def test_what_somebody_else_froze_stays_so(host: Host) -> None:
    gc.freeze()
    start(host)
    before = gc.get_freeze_count()
    host.script_callbacks.fire("script_unloaded")
    assert gc.get_freeze_count() > 0.9 * before


@pytest.mark.parametrize("kind", [kind for kind in kinds() if issubclass(kind, WebUISession)])
def test_in_the_other_webuis_objects_are_frozen_while_scripts_are_loaded(
    kind: type[WebUISession], monkeypatch: pytest.MonkeyPatch
) -> None:
    # a stand-in has its network at once
    monkeypatch.setattr(gc_pause, "LARGE", 1 << 40)
    before = len(gc.get_objects())
    for on in (False, True):
        with world_of(kind) as world:
            world.opts.sfast_enabled = on
            kind.start("test")
            assert (gc.get_freeze_count() > 0.9 * before) == on
            kind.stop()
            assert gc.get_freeze_count() < 0.1 * before


def test_the_size_of_parameters() -> None:
    class Proxy:
        @property
        def __class__(self) -> type:
            raise AssertionError("asked for its class")

    meta = nn.Linear(100, 100, bias=False, device="meta")
    without_start = nn.Module.__new__(nn.Module)
    objects = [Proxy(), nn.Linear(3, 5, bias=False), nn.Linear(2, 1), meta, without_start, nn.Linear, "text"]
    assert gc_pause.parameter_bytes([*objects, nn.LazyLinear(3, bias=False)]) == 4 * (15 + 3 + 10_000)


def test_a_session_starts_if_nothing_can_be_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(objects: object) -> int:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(gc_pause, "parameter_bytes", fails)
    pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit")
    (kind,) = (kind for kind in kinds() if kind.__name__ == "A1111Session")
    with importlib.import_module("hosts.standins.a1111").running() as host:
        kind.start("test")
        assert kind.running is not None and gc.get_freeze_count() == 0
        kind.stop()
    assert [type(error) for error in host.errors] == [RuntimeError]


def test_garbage_of_the_page_before_is_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_pause, "LARGE", 1 << 40)
    (kind,) = (kind for kind in kinds() if kind.__name__ == "A1111Session")
    with world_of(kind) as world:
        world.opts.sfast_enabled = True
        kind.start("test")
        kind.stop()
        page = weakref.ref(Ring())
        # among the old ones
        gc.freeze()
        gc.unfreeze()
        kind.start("test")
        assert page() is None
