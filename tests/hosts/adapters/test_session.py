"""What all sessions inherit, on a host that is nothing but its registrars."""

from __future__ import annotations

import io
import logging
import sys
import threading
import zlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image, PngImagePlugin

from sfast_ext.hosts import session, xyz
from sfast_ext.hosts.session import Session
from sfast_ext.ui import settings_table, tab


class Host:
    """Callbacks by name, and the settings that were registered."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Any] = {}
        self.options: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda callback: self.callbacks.update({name.removeprefix("on_"): callback})


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    opts = SimpleNamespace(
        add_option=lambda key, option: host.options.update({key: option}), data_labels=host.options
    )
    state = SimpleNamespace(begin=None, end=None, interrupt=None)
    shared = SimpleNamespace(
        opts=opts, OptionInfo=lambda *args, **more: SimpleNamespace(given=(args, more)), state=state
    )
    modules = ModuleType("modules")
    processing = SimpleNamespace(process_images_inner=lambda p: p)
    queue = SimpleNamespace(queue_lock=threading.Lock())
    beside = {"script_callbacks": host, "shared": shared, "processing": processing, "call_queue": queue}
    vars(modules).update(beside)
    for name, module in (("modules", modules), *((f"modules.{name}", each) for name, each in beside.items())):
        monkeypatch.setitem(sys.modules, name, module)
    kinds = dict.fromkeys(("Checkbox", "Slider", "Radio", "HTML"), object)
    monkeypatch.setitem(sys.modules, "gradio", SimpleNamespace(**kinds))
    return host


@pytest.fixture
def kind(host) -> Iterator[type[Any]]:
    class Recorded(Session):
        HOST = "a host"

        TESTED = ("1",)

        def __init__(self, version: str, found: Any = None) -> None:
            super().__init__(version, found)
            self.undone: list[str] = []
            nothing = {"release": lambda: self.undone.append("models"), "status": lambda: [{}], "drop_plans": lambda: 0}
            self.attachments = (SimpleNamespace(**nothing),)

        def install(self, host: Any) -> None:
            host.add(lambda: self.undone.append("first"), lambda: self.undone.append("second"))

        def host_version(self) -> str:
            return "1"

        def model_name(self) -> str | None:
            return None

        def loaded(self) -> Any:
            return None

    yield Recorded
    Recorded.stop()


def test_a_start_registers_and_a_stop_undoes_it_in_reverse(host, kind):
    kind.start("0")
    running = kind.running
    assert set(settings_table.KEYS) < set(host.options)
    assert {"ui_settings", "script_unloaded", "app_started"} <= set(host.callbacks)
    kind.stop()
    assert running.undone == ["models", "second", "first"] and kind.running is None
    kind.stop()


@pytest.mark.parametrize(
    ("chosen", "missing", "ours"),
    [
        ({}, None, True),
        ({"sfast_png": False}, None, False),
        ({"sfast_enabled": False}, None, False),
        ({}, "torch finds no NVIDIA GPU", False),
        ({"sfast_allow_cpu": True}, "torch finds no NVIDIA GPU", True),
    ],
)
def test_png_files_are_compressed_by_several_threads_if_the_user_wants_it(
    host, kind, monkeypatch, chosen, missing, ours
):
    monkeypatch.setattr(session.environment, "no_gpu", lambda: missing)
    compressed = []
    monkeypatch.setattr(
        session.parallel_png, "compressed", lambda rows, *_: compressed.append(rows.shape) or _packed(rows)
    )
    pillows = PngImagePlugin._save
    kind.start("0")
    # the small image of the start
    compressed.clear()
    vars(sys.modules["modules.shared"].opts).update(chosen)
    file, im = io.BytesIO(), Image.new("RGB", (400, 300), "teal")
    im.save(file, "PNG")
    assert compressed == [(300, 1200)] * ours
    assert Image.open(file).tobytes() == im.tobytes()
    kind.stop()
    assert Image.SAVE["PNG"] is pillows
    im.save(file, "PNG")
    assert len(compressed) == ours


def _packed(rows):
    """Without a filter."""
    return [zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))]


def test_a_second_start_releases_the_first_session(host, kind):
    kind.start("0")
    first = kind.running
    kind.start("1")
    assert first.undone and kind.running is not first and not kind.running.undone
    assert Session.running is None


def test_the_status_has_the_parts_of_every_host(host, kind):
    kind.start("0")
    status = kind.running.status()
    assert (status["version"], status["host"]) == ("0", {"name": "a host", "version": "1", "remarks": []})
    assert status["enabled"] and status["accelerators"] == [{}] and status["last_error"] is None


@pytest.mark.parametrize("shown", [True, False])
def test_no_exception_reaches_the_host(host, kind, shown, monkeypatch):
    seen = []

    def show(self, exc):
        seen.append(exc)
        if not shown:
            raise RuntimeError("the host cannot show it")

    monkeypatch.setattr(kind, "show_error", show)
    mine = kind("0")
    mine.callback(lambda *args, **more: {}[args[0]])("a model", more=1)
    error = mine.status()["last_error"]
    assert error["stage"] == "host callback" and "a model" in error["message"]
    assert [type(exc) for exc in seen] == [KeyError]


def test_the_console_says_as_much_as_the_setting_wants(host, kind):
    logger = logging.getLogger("sfast_ext")
    kind.start("0")
    assert logger.level == logging.INFO
    sys.modules["modules.shared"].opts.sfast_log_level = "quiet"
    kind.running.config()
    assert logger.level == logging.WARNING
    kind.stop()
    assert logger.level == logging.NOTSET


def test_the_tab_is_one_of_the_host_s(host, kind, monkeypatch):
    kind.start("0")
    asked, recent = [], kind.running.source.recent
    assert recent.made() and recent.text() is None
    sys.modules["modules.shared"].state = SimpleNamespace(job="task(1)", textinfo=None)
    assert recent.text()
    monkeypatch.setattr(tab, "tabs", lambda do: asked.append((do.drop(), do.report())) or [("page", "t", "k")])
    assert host.callbacks["ui_tabs"]() == [("page", "t", "k")]
    ((dropped, text),) = asked
    assert dropped == 0 and text.startswith("Stable Fast 0 in a host 1")
    # what the page asks for next is not what it was told before
    assert recent.text() is None


def test_a_tab_that_cannot_be_made_leaves_the_host_s_others(host, kind):
    kind.start("0")
    # the stand-in of gradio has no pages
    assert host.callbacks["ui_tabs"]() == []
    assert kind.running.status()["last_error"]["stage"] == "the tab"


def test_stages_are_shown_if_the_host_shows_text(host, kind):
    kind.start("0")
    state = SimpleNamespace(job="task(1)", textinfo=None)
    sys.modules["modules.shared"].state = state
    assert kind.running.status()["busy"]
    kind.running.report.preparing("512x512", "recording")
    assert state.textinfo == "Stable Fast: recording"
    kind.running.report.preparing(None)
    assert state.textinfo is None


def test_the_plot_gets_its_axes_if_the_host_has_one(host, kind, monkeypatch):
    kind.start("0")
    host.callbacks["before_ui"]()
    axes = []
    monkeypatch.setattr(kind, "xyz_grid", lambda self: "the module")
    monkeypatch.setattr(xyz, "add_axes", axes.append)
    host.callbacks["before_ui"]()
    assert axes == ["the module"] and kind.running.status()["last_error"] is None


@pytest.mark.parametrize(
    ("missing", "chosen", "said"),
    [
        (None, {}, "a card, torch 2.7, CUDA C++ kernels; on"),
        (None, {"sfast_enabled": False}, "a card, torch 2.7, CUDA C++ kernels; off, see Settings > Stable Fast"),
        ("torch finds no NVIDIA GPU", {"sfast_enabled": False}, "no supported NVIDIA GPU (torch finds no NVIDIA GPU)"),
        ("torch finds no NVIDIA GPU", {"sfast_allow_cpu": True}, "a card, torch 2.7, CUDA C++ kernels; on"),
    ],
)
def test_the_first_line_says_what_was_found_and_what_will_happen(host, kind, monkeypatch, missing, chosen, said):
    monkeypatch.setattr(session.environment, "no_gpu", lambda: missing)
    monkeypatch.setattr(session.environment, "in_short", lambda: "a card, torch 2.7, CUDA C++ kernels")
    vars(sys.modules["modules.shared"].opts).update(chosen)
    line = kind.start("0.2").greeting()
    assert line.startswith(f"Stable Fast 0.2: {said}") and "\n" not in line


def test_a_broken_driver_stops_no_start(host, kind, monkeypatch):
    def broken():
        raise RuntimeError("CUDA unknown error")

    monkeypatch.setattr(session.environment, "no_gpu", broken)
    line = kind.start("0.2").greeting()
    assert line.startswith("Stable Fast 0.2: no supported NVIDIA GPU (RuntimeError: CUDA unknown error)")
