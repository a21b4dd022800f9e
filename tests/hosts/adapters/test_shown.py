"""What a user is shown of images that a host's stand-in makes: sizes in words, the last image, dropped plans."""

from __future__ import annotations

import logging
import re
import sys
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")

from hosts.adapters.test_a1111 import host, started, status  # noqa: F401
from sfast_ext.hosts.a1111 import adapter


def plans():
    return [plan for each in status()["accelerators"] for plan in each["plans"]]


def test_a_plan_is_called_by_its_size_and_the_last_image_s_is_marked(host):  # noqa: F811
    started(host)
    host.generate(steps=4)
    host.generate(size=16, steps=4)
    assert [(p["label"], p["last_pass"]) for p in plans()] == [
        ("64x64, 1 image, 7 tokens", False),
        ("128x128, 1 image, 7 tokens", True),
    ]
    host.generate(steps=4)
    assert [p["label"] for p in plans() if p["last_pass"]] == ["64x64, 1 image, 7 tokens"]


def test_every_step_of_an_image_is_one_of_the_last_image_s(host):  # noqa: F811
    started(host)
    host.generate(steps=5)
    assert status()["last_pass"] == {"accelerated": 4, "bypassed": 0, "prepared": 1}
    host.shared.loaded_hypernetworks = [SimpleNamespace(name="anime")]
    host.generate(steps=5)
    assert status()["last_pass"] == {"accelerated": 0, "bypassed": 5, "prepared": 0}
    assert [row["calls_last"] for row in status()["reasons_listed"]] == [5]


def test_no_plan_is_that_of_an_image_that_was_not_accelerated(host):  # noqa: F811
    started(host)
    host.generate(steps=4)
    assert [plan["last_pass"] for plan in plans()] == [True]
    host.shared.loaded_hypernetworks = [SimpleNamespace(name="anime")]
    host.generate(steps=4)
    assert [plan["last_pass"] for plan in plans()] == [False] and status()["badge"]["help"] == "hypernetwork"


def test_an_image_with_the_extension_off_leaves_nothing_said_of_the_one_before(host):  # noqa: F811
    started(host)
    host.request(steps=4)
    assert [plan["last_pass"] for plan in plans()] == [True] and status()["badge"]["state"] == "on"
    # as a request's override, or an X/Y/Z plot, sets it
    host.opts.data["sfast_enabled"] = False
    host.request(steps=4)
    host.opts.data["sfast_enabled"] = True
    assert status()["badge"]["state"] == "ready" and not any(status()["last_pass"].values())
    assert not any(plan["last_pass"] for plan in plans())
    host.shared.loaded_hypernetworks = [SimpleNamespace(name="anime")]
    host.request(steps=4)
    host.opts.data["sfast_enabled"] = False
    host.request(steps=4)
    assert [row["calls_last"] for row in status()["reasons_listed"]] == [0]
    host.opts.data["sfast_enabled"] = True
    host.shared.loaded_hypernetworks = []
    host.request(steps=4)
    assert status()["badge"]["state"] == "on"


def test_the_speed_up_is_that_which_was_measured(host, monkeypatch):  # noqa: F811
    started(host)
    host.generate(steps=5)
    (plan,) = plans()
    assert plan["ms_before"] > 0 and plan["ms_after"] > 0
    # on a CPU the original's time is that of one run, of the first
    assert plan["speedup"] is None
    badge = status()["badge"]
    assert badge["state"] == "on" and re.fullmatch(r"[\d.]+ it/s", badge["text"])
    (held,) = (p for a in adapter.A1111Session.running.attachments for x in a._accelerators for p in x.plans.values())
    monkeypatch.setattr(held, "device", torch.device("cuda:0"))
    assert held.speedup() == plan["ms_before"] / plan["ms_after"]
    monkeypatch.setattr(held, "ms_before", None)
    assert held.speedup() is None


def test_dropped_plans_are_made_anew(host):  # noqa: F811
    started(host)
    image = host.generate(steps=4)
    session = adapter.A1111Session.running
    assert session.drop_plans() == 1 and plans() == []
    assert session.drop_plans() == 0
    torch.testing.assert_close(host.generate(steps=4), image)
    assert len(plans()) == 1


def test_a_report_names_what_happened(host):  # noqa: F811
    started(host)
    host.generate(steps=4)
    text = adapter.A1111Session.running.bug_report()
    for part in ("AUTOMATIC1111 WebUI v1.10.1", "64x64, 1 image, 7 tokens", "sfast_check", "torch:"):
        assert part in text
    assert "seed 1" not in text


def test_a_report_names_no_hypernetwork_and_the_page_does(host):  # noqa: F811
    started(host)
    host.shared.loaded_hypernetworks = [SimpleNamespace(name="secret; face")]
    host.generate(steps=3)
    session = adapter.A1111Session.running
    text, status = session.bug_report(), session.status()
    # the badge, its details, the row and the event
    assert "secret" not in text and text.count("a hypernetwork is active: <name>") == 4
    assert "secret; face" in status["badge"]["text"] and status["badge"]["help"] == "hypernetwork"
    (row,) = status["reasons_listed"]
    assert (row["code"], row["values"]) == ("hypernetwork", ["secret; face"]) and "secret; face" in row["reason_parts"]


def test_the_status_takes_less_than_two_milliseconds_and_asks_the_gpu_nothing(host, monkeypatch):  # noqa: F811
    started(host)
    for size in (8, 16):
        host.generate(size=size, steps=3)
    session = adapter.A1111Session.running
    session.status()

    def asked(*args, **more):
        raise AssertionError("the GPU was asked")

    for name in ("is_available", "mem_get_info", "get_device_properties", "memory_reserved", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, asked)
    taken = []
    for _ in range(50):
        started_at = time.perf_counter()
        session.status()
        taken.append(time.perf_counter() - started_at)
    # the quickest: what other processes do does not count
    assert min(taken) < 2e-3


class WithoutABar(logging.Handler):
    """The WebUI's own handler while no progress bar is shown."""

    def __init__(self, fallback):
        super().__init__()
        self.emit = fallback.emit


@pytest.mark.parametrize("around", [None, WithoutABar])
def test_the_console_names_the_stages_once_if_the_webui_configures_no_log(host, capsys, monkeypatch, around):  # noqa: F811
    monkeypatch.setitem(sys.modules, "modules.logging_config", SimpleNamespace(TqdmLoggingHandler=around))
    logger = logging.getLogger("sfast_ext")
    # pytest's own handlers are there
    monkeypatch.setattr(logging.root, "handlers", [])
    before = list(logger.handlers)
    started(host)
    (handler,) = (each for each in logger.handlers if each not in before)
    # as a package does that logs by functions of the module; it gives the root logger a handler
    logging.warning("something")
    assert logging.root.handlers
    host.generate(steps=3)
    lines = capsys.readouterr().err.splitlines()
    for part in ("preparing 64x64, 1 image, 7 tokens: recording ...", "prepared 64x64, 1 image, 7 tokens in "):
        (line,) = (line for line in lines if part in line)
        assert line.startswith("Stable Fast: ")
    adapter.A1111Session.stop()
    assert handler not in logger.handlers and logger.propagate
