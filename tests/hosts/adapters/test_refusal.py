"""What a user is shown in a host that cannot be served, and in one in which a part is lost: console, badge, doctor."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hosts.standins.worlds import World, kinds, world_of
from sfast_ext import hosts, last_start
from sfast_ext.hosts.session import Session
from sfast_ext.tools import doctor
from sfast_ext.ui import api
from sfast_ext.ui.requests import Refused

fastapi = pytest.importorskip("fastapi")
testclient = pytest.importorskip("fastapi.testclient")


def named(kind: Any) -> str:
    return str(kind.__name__)


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch) -> Iterator[None]:
    """What was said lies in a folder of this test."""
    # of this user alone
    folder = tmp_path / "cache"
    folder.mkdir(0o700)
    monkeypatch.setattr(last_start, "FOLDER", lambda: folder)
    yield


def served(world: World) -> Any:
    app = fastapi.FastAPI()
    world.fire("app_started", None, app)
    return testclient.TestClient(app)


@pytest.mark.parametrize("kind", kinds(), ids=named)
def test_the_badge_and_the_status_say_what_is_missing(kind, monkeypatch, capsys):
    with world_of(kind) as world:
        monkeypatch.delattr(sys.modules["modules.script_callbacks"], "on_model_loaded")
        assert hosts.start("0.9") is None
        (line,) = capsys.readouterr().out.splitlines()
        missing = "modules.script_callbacks has no on_model_loaded"
        assert line == f"Stable Fast 0.9 does nothing in {kind.HOST}: {missing}."
        found = served(world).get(api.STATUS).json()
        assert found["unserved"] == f"this WebUI lacks what Stable Fast relies on: {missing}"
        assert found["badge"]["state"] == "none" and found["badge"]["help"] == "unserved"
        detail = found["badge"]["detail"]
        assert missing in detail and "".join(found["badge"]["detail_parts"]) == detail
        assert found["version"] == "0.9" and found["host"]["name"] == kind.HOST and found["accelerators"] == []
        assert missing in served(world).get(f"{api.ROOT}/report").json()["text"]
        for start in ("prepare", "measure"):
            answer = served(world).post(f"{api.ROOT}/{start}", json={"sizes": ["512x512"]})
            assert answer.status_code in (404, 409, 422), answer.text


@pytest.mark.parametrize("kind", kinds(), ids=named)
def test_a_step_that_raises_is_said_as_well(kind, monkeypatch, capsys):
    def install(self, host):
        host.add(lambda: None)
        raise LookupError("no such queue")

    monkeypatch.setattr(kind, "install", install)
    with world_of(kind) as world:
        hosts.start("0.9")
        (line,) = [each for each in capsys.readouterr().out.splitlines() if "does nothing" in each]
        assert line.endswith("LookupError: no such queue.")
        assert "no such queue" in served(world).get(api.STATUS).json()["unserved"]


def test_a_password_is_asked_for_there_too(monkeypatch):
    (kind,) = [each for each in kinds() if each.__name__ == "A1111Session"]
    with world_of(kind) as world:
        sys.modules["modules.shared"].cmd_opts.api_auth = "one:two"
        monkeypatch.delattr(sys.modules["modules.script_callbacks"], "on_model_loaded")
        hosts.start("0")
        client = served(world)
        assert client.get(api.STATUS).status_code == 401
        assert client.get(api.STATUS, auth=("one", "two")).status_code == 200


@pytest.mark.parametrize("gone", ["modules.shared", "modules.script_callbacks:on_app_started"])
@pytest.mark.parametrize("kind", kinds(), ids=named)
def test_where_nothing_can_be_shown_the_console_alone_says_it(kind, gone, monkeypatch, capsys):
    with world_of(kind) as world:
        module, _, name = gone.partition(":")
        if name:
            monkeypatch.delattr(sys.modules[module], name)
            monkeypatch.delattr(sys.modules[module], "on_model_loaded")
        else:
            monkeypatch.setitem(sys.modules, module, None)
            monkeypatch.delattr(sys.modules["modules"], module.partition(".")[2])
        assert hosts.start("0") is None
        assert len([each for each in capsys.readouterr().out.splitlines() if "does nothing" in each]) == 1
        assert not world.callbacks["app_started"]


def test_a_second_start_takes_the_way_to_ask_of_the_first_away(monkeypatch):
    (kind,) = [each for each in kinds() if each.__name__ == "ForgeSession"]
    with world_of(kind) as world:
        callbacks = sys.modules["modules.script_callbacks"]
        register = callbacks.on_model_loaded
        del callbacks.on_model_loaded
        hosts.start("0")
        callbacks.on_model_loaded = register
        hosts.start("1")
        assert kind.running is not None
        found = served(world).get(api.STATUS).json()
        assert found["unserved"] is None and found["version"] == "1"


@pytest.mark.parametrize("kind", kinds(), ids=named)
def test_prepare_and_measure_are_refused_without_what_they_need(kind, monkeypatch):
    with world_of(kind):
        monkeypatch.delattr(importlib.import_module("modules.call_queue"), "queue_lock")
        hosts.start("0")
        assert kind.running is not None
        jobs = kind.running.source.jobs
        for start in (jobs.prepare, jobs.measure):
            with pytest.raises(Refused, match="cannot be started: modules.call_queue has no queue_lock"):
                start([])


@pytest.mark.parametrize(("release", "check"), [("2.26", "never"), ("2.99", "first")])
def test_in_a_release_that_was_not_tested_plans_are_compared_whatever_the_setting(monkeypatch, release, check):
    (kind,) = [each for each in kinds() if each.__name__ == "ForgeSession"]
    with world_of(kind) as world:
        monkeypatch.setattr(sys.modules["modules_forge.forge_version"], "release", release)
        hosts.start("0")
        assert kind.running is not None
        world.opts.data["sfast_check"] = "never"
        assert kind.running.config().check == check
        world.opts.data["sfast_check"] = "always"
        assert kind.running.config().check == "always"


def test_doctor_says_what_was_missing_at_the_last_start(monkeypatch):
    (kind,) = [each for each in kinds() if each.__name__ == "ForgeSession"]
    assert doctor.collect()["last_start"] is None
    with world_of(kind):
        hosts.start("0")
    assert last_start.read() == {"version": "0", "host": "Forge Neo neo 2.26", "lines": []}
    told = doctor.text(doctor.collect())
    assert "At its last start, in Forge Neo neo 2.26\n  All that it relies on was there." in told
    with world_of(kind):
        monkeypatch.setattr(sys.modules["modules_forge.forge_version"], "release", "2.99")
        monkeypatch.delattr(sys.modules["modules.upscaler"], "Upscaler")
        hosts.start("0")
    told = doctor.text(doctor.collect())
    assert "  Forge Neo neo 2.99 was not tested by us\n" in told
    lost = "GPU memory held for fast replays is freed later than the WebUI needs it"
    assert f"{lost}: modules.upscaler has no Upscaler" in told
    with world_of(kind):
        monkeypatch.delattr(sys.modules["modules.script_callbacks"], "on_cfg_denoiser")
        hosts.start("0")
    assert "  this WebUI lacks what Stable Fast relies on: " in doctor.text(doctor.collect())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"lines": 3}', "\xff"])
def test_a_file_of_another_kind_is_no_last_start(text):
    (last_start.FOLDER() / "last_start.json").write_text(text, encoding="latin-1")
    assert last_start.read() is None


def test_a_folder_that_cannot_be_written_keeps_nobody_from_starting(monkeypatch):
    (kind,) = [each for each in kinds() if each.__name__ == "ForgeSession"]

    def nowhere() -> Any:
        raise RuntimeError("no home")

    monkeypatch.setattr(last_start, "FOLDER", nowhere)
    with world_of(kind):
        hosts.start("0")
        assert kind.running is not None


def test_which_versions_are_tested():
    known = "neo 2.26", "v1.10.1", "058a7f0c"
    for version, tested in (
        ("neo 2.26", True),
        ("neo 2.26.1", True),
        ("neo 2.260", False),
        ("neo 2.2", False),
        ("v1.10.1-93-gfd68e0c", True),
        ("v1.10.12", False),
        ("v1.1.1", False),
        ("058a7f0c", True),
        ("unknown", False),
    ):
        some = SimpleNamespace(TESTED=known, is_host=lambda: True, host_version=lambda v=version: v)
        assert Session.is_tested(some) is tested, version  # type: ignore[arg-type]
