"""What is done before the first image, on the hosts' stand-ins: the image is the same, and nobody waits for it."""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")

from hosts.adapters.test_a1111 import count, reference, same, status, unet_of
from hosts.standins import a1111 as standin
from hosts.standins.sdnext import hosted, pipeline

from sfast_ext import report as reports
from sfast_ext.call_signature import Signature, flatten_call
from sfast_ext.hosts import host_queue, idle
from sfast_ext.hosts.a1111 import adapter
from sfast_ext.jobs import ahead, kept_calls, rehearsal
from sfast_ext.jobs.kept_calls import KeptCall, KeptCalls
from sfast_ext.report import Report
from sfast_ext.ui.requests import Wanted, from_text

LONG = 30.0


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SFAST_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(ahead, "GPU_ALONE", False)
    monkeypatch.setattr(ahead, "QUIET_S", 0.0)
    monkeypatch.setattr(ahead, "LOOK_S", 0.01)
    return tmp_path / "cache"


class Queue:
    """A lock that tells who waits for it, as AUTOMATIC1111's does."""

    def __init__(self):
        self._lock, self._pending_threads = threading.Lock(), []

    def __enter__(self):
        if not self._lock.acquire(False):
            own = object()
            self._pending_threads.append(own)
            self._lock.acquire()
            self._pending_threads.remove(own)

    def __exit__(self, *exc):
        self._lock.release()

    def locked(self):
        return self._lock.locked()


class Process:
    """A WebUI from its start to its end."""

    def __init__(self, **settings):
        self._running = standin.running(**{"sfast_allow_cpu": True, "sfast_ahead": True, **settings})

    def __enter__(self):
        self.host, self.images, self.queued = self._running.__enter__(), [], None
        sys.modules["modules.call_queue"].queue_lock = Queue()
        # the page tells of tasks that wait
        self.tasks = OrderedDict()
        sys.modules["modules.progress"] = SimpleNamespace(pending_tasks=self.tasks)
        return self

    def __exit__(self, *exc):
        adapter.A1111Session.stop()
        del sys.modules["modules.progress"]
        assert self.host.errors == []
        self._running.__exit__(*exc)
        for thread in threading.enumerate():
            if thread.name == "sfast: ahead":
                thread.join(LONG)
                assert not thread.is_alive()

    def load(self, seed=1, channels=32):
        adapter.start("test")
        self.host.load(seed, channels)
        return self

    def serve(self):
        """The page is there."""
        for callback in self.host.callbacks["app_started"]:
            callback(None, SimpleNamespace(router=SimpleNamespace(routes=[]), openapi_schema=None))
        return self

    def wait(self):
        """Until nothing is done any more; the job, or None if there was none."""
        thread = next((t for t in threading.enumerate() if t.name == "sfast: ahead"), None)
        if thread is not None:
            thread.join(LONG)
            assert not thread.is_alive()
        return adapter.A1111Session.running.rehearsals.jobs.status()

    def begin(self):
        """As `serve` and `wait`."""
        return self.load().serve().wait()


@functools.lru_cache(maxsize=None)
def left(**options):
    """The files that a first process leaves, with an image."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFAST_CACHE_DIR", folder)
        first_process(**options)
        return {file.relative_to(folder): file.read_bytes() for file in Path(folder).rglob("*") if file.is_file()}


def keep(**options):
    for name, content in left(**options).items():
        file = Path(os.environ["SFAST_CACHE_DIR"], name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def first_process(**options):
    with Process() as process:
        process.load()
        process.host.request(steps=3, **options)
        assert process.serve().wait() is None


@pytest.fixture(autouse=True)
def routes(monkeypatch):
    """Those of the API are no part of this."""
    from sfast_ext.hosts import session

    monkeypatch.setattr(session.api, "register", lambda app, source: None)


@pytest.mark.long(but=[0, 3])
@pytest.mark.parametrize("options", [{}, {"size": 16}, {"tokens": 14}, {"size": 24, "tokens": 21}])
def test_the_first_image_finds_its_plan_and_is_the_same(options):
    keep(**options)
    with Process() as process:
        job = process.begin()
        assert job["kind"] == "prepare" and job["state"] == "done" and job["rows"][0]["ready"], job
        assert count("captures") == 1
        queue = sys.modules["modules.call_queue"].queue_lock
        assert not queue.locked() and not process.host.shared.state.interrupted
        image = process.host.request(steps=3, **options).images[0]
        assert count("captures") == 1 and status()["last_pass"] == {"accelerated": 3, "bypassed": 0, "prepared": 0}
        assert same(image, reference(1, steps=3, **options))


def test_no_plan_is_held_once_the_extension_is_off():
    with Process() as process:
        process.load()
        process.host.request(steps=3)
        (plan,) = (weakref.ref(each) for each in adapter.A1111Session.running.loaded().plans.values())
        process.host.opts.data["sfast_enabled"] = False
        process.host.request(steps=3)
        gc.collect()
        assert plan() is None


def test_another_size_is_made_as_ever():
    keep()
    with Process() as process:
        assert process.begin()["state"] == "done"
        image = process.host.request(steps=3, size=16).images[0]
        assert count("captures") == 2 and same(image, reference(1, steps=3, size=16))


def test_weights_that_were_loaded_meanwhile_are_used():
    keep()
    with Process() as process:
        assert process.begin()["state"] == "done"
        process.host.load(2)
        assert same(process.host.request(steps=3).images[0], reference(2, steps=3))


def test_the_random_state_is_that_of_a_process_without_it():
    keep()
    with Process() as process:
        process.load()
        torch.manual_seed(11)
        before = torch.get_rng_state()
        assert process.serve().wait()["state"] == "done"
        assert torch.equal(torch.get_rng_state(), before)
        assert status()["last_pass"] == {"accelerated": 0, "bypassed": 0, "prepared": 0}
        assert status()["reasons_since_start"] == {}


def test_of_hires_fix_the_first_pass_counts():
    with Process() as process:
        process.load()
        processing = sys.modules["modules.processing"]
        p = SimpleNamespace(extra_generation_params={}, options={"steps": 2})
        inner = process.host.generate
        process.host.generate = lambda **options: (inner(size=8, **options), inner(size=16, **options))[1]
        for _ in range(2):
            processing.process_images_inner(p)
        (call,) = json.loads((KeptCalls()._folder() / "last_calls.json").read_text()).values()
        assert call["size"] == [64, 64]


def waits(process):
    process.tasks["task(1)"] = time.time()


def queues(process):
    """A request to the API."""
    process.queued = threading.Thread(target=lambda: process.images.append(process.host.request(steps=3)))
    process.queued.start()


def interrupts(process):
    process.host.shared.state.interrupt()


def is_released(process):
    threading.Thread(target=adapter.A1111Session.running.rehearsals.close).start()


STAGES, EVENTS = ["recording", "compiling", "first run", "comparing"], [waits, queues, interrupts, is_released]


# each stage with two of them, each of them in two stages
@pytest.mark.parametrize(
    ("stage", "event"), [(STAGES[i], EVENTS[(i + j) % 4]) for i in range(4) for j in range(2)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_it_is_given_up_at_once_and_leaves_nothing(stage, event):
    keep()
    with Process() as process:
        process.load()
        session, seen = adapter.A1111Session.running, []

        def shown(said):
            if said is not None and stage in said and not seen:
                seen.append(said)
                event(process)
                until = time.monotonic() + LONG
                while not session.rehearsals.jobs.stopped() and time.monotonic() < until:
                    time.sleep(0.002)

        session.report.on_stage = shown
        job = process.serve().wait()
        if not seen:
            pytest.skip("a plan on a CPU has no such stage")
        assert job["state"] == "cancelled" and job["rows"] == []
        if process.queued is None:
            assert session.loaded() is None or not session.loaded().plans or stage == "comparing"
        session.report.on_stage = None
        if process.queued is not None:
            process.queued.join(LONG)
            assert same(process.images[0].images[0], reference(1, steps=3))
            assert count("captures") == 1 and status()["reasons"] == {}
            return
        assert status()["counters"].get("errors", 0) == 0 and status()["last_error"] is None
        assert not sys.modules["modules.call_queue"].queue_lock.locked()
        process.tasks.clear()
        process.host.shared.state.begin("an image")
        process.host.shared.state.end()
        image = process.host.request(steps=3).images[0]
        assert same(image, reference(1, steps=3)) and status()["reasons"] == {}
        assert status()["last_pass"]["accelerated"] == 2, status()


def test_a_capture_ends_in_the_middle_and_no_reason_is_kept(monkeypatch):
    keep()
    with Process() as process:
        process.load()
        operations = []

        def breathe():
            if reports.rehearsing() and reports.stage() == "capture":
                operations.append(1)
                if len(operations) == 40:
                    adapter.A1111Session.running.rehearsals.jobs.cancel()
            own()

        own = reports.breathe
        from sfast_ext.capture import capture, fake_trace, quick_record

        for module in (capture, fake_trace, quick_record):
            monkeypatch.setattr(module, "breathe", breathe)
        job = process.serve().wait()
        assert job["state"] == "cancelled" and 40 <= len(operations) < 60
        # the forward is as it was, and no call was refused
        assert status()["reasons_since_start"] == {} and not adapter.A1111Session.running.loaded().plans
        image = process.host.request(steps=3).images[0]
        assert same(image, reference(1, steps=3)) and count("captures") == 1


def test_a_forward_that_takes_the_end_for_a_failure_makes_no_plan(monkeypatch):
    keep()
    with Process() as process:
        process.load()
        unet = unet_of(process.host)
        kind = type(unet)
        inner = kind.forward

        def forward(self, *args, **kwargs):
            try:
                return inner(self, *args, **kwargs)
            except Exception:
                return args[0] * 0

        monkeypatch.setattr(kind, "forward", forward)
        cancelled = []

        def shown(said):
            if said is not None and "recording" in said and not cancelled:
                cancelled.append(said)
                host_queue.interrupt()

        adapter.A1111Session.running.report.on_stage = shown
        process.serve().wait()
        accelerator = adapter.A1111Session.running.loaded()
        assert accelerator is None or not accelerator.plans


def test_an_image_without_the_queue_ends_it_first():
    """Another extension may call the WebUI's function from a thread of its own."""
    keep()
    with Process() as process:
        process.load()
        session, images = adapter.A1111Session.running, []
        beside = threading.Thread(
            target=lambda: images.append(
                sys.modules["modules.processing"].process_images_inner(
                    SimpleNamespace(extra_generation_params={}, options={"steps": 3})
                )
            )
        )

        def shown(said):
            if said is not None and "recording" in said and not beside.is_alive() and not images:
                beside.start()
                until = time.monotonic() + LONG
                while not session.rehearsals.jobs.stopped() and time.monotonic() < until:
                    time.sleep(0.002)
                session.report.on_stage = None

        session.report.on_stage = shown
        assert process.serve().wait()["state"] == "cancelled"
        beside.join(LONG)
        assert same(images[0].images[0], reference(1, steps=3))


@pytest.mark.parametrize(
    "settings",
    [
        {"sfast_ahead": False},
        {"sfast_enabled": False},
        {"sfast_preset": "small card"},
        {"diffusers_offload_mode": "balanced"},
    ],
    ids=lambda each: next(iter(each)),
)
def test_settings_that_leave_no_room_for_it(settings):
    keep()
    with Process(**settings) as process:
        assert process.begin() is None


@pytest.mark.parametrize("flag", idle.LITTLE_MEMORY)
def test_flags_for_cards_of_little_memory(flag):
    keep()
    with Process() as process:
        setattr(process.host.shared.cmd_opts, flag, True)
        assert process.begin() is None


def test_nothing_is_done_for_a_model_of_another_kind():
    keep()
    with Process() as process:
        process.load(channels=64)
        assert process.serve().wait() is None


def test_nothing_is_done_where_the_host_does_not_tell_who_waits():
    keep()
    with Process() as process:
        # whoever waits for such a lock could not be seen
        sys.modules["modules.call_queue"].queue_lock = threading.Lock()
        assert host_queue.waiting() is None
        assert process.begin() is None


def test_who_waits_is_known_from_the_queue_or_from_the_page():
    with Process() as process:
        assert host_queue.waiting() is False
        process.tasks["task(1)"] = 1.0
        assert host_queue.waiting() is True
        process.tasks.clear()
        lock = sys.modules["modules.call_queue"].queue_lock
        lock._pending_threads.append(threading.Event())
        assert host_queue.waiting() is True
        lock._pending_threads.clear()
        del sys.modules["modules.progress"].pending_tasks
        assert host_queue.waiting() is False


def test_a_busy_host_is_left_alone_and_so_is_one_that_had_an_image():
    keep()
    with Process() as process:
        process.load()
        process.host.shared.state.job = "another job"
        process.serve()
        time.sleep(0.3)
        assert adapter.A1111Session.running.rehearsals.jobs.status() is None
        process.host.shared.state.job = ""
        assert process.wait()["state"] == "done"
    with Process() as process:
        process.load()
        process.host.request(steps=2)
        assert process.serve().wait() is None


def test_a_job_of_the_user_comes_first():
    keep()
    with Process() as process:
        process.load()
        session = adapter.A1111Session.running
        jobs, started = session.rehearsals.jobs, []
        session.report.on_stage = lambda said: time.sleep(0.05) if said else None
        process.serve()
        until = time.monotonic() + LONG
        while jobs.status() is None and time.monotonic() < until:
            time.sleep(0.002)
        with pytest.raises(Exception, match="make one image"):
            started.append(session.rehearsals.prepare(from_text("64x64", "1")))
        process.wait()
        assert jobs.status()["state"] in ("cancelled", "done")


def test_without_a_setting_nothing_is_kept(cache):
    with Process(sfast_ahead=False) as process:
        process.load()
        process.host.request(steps=2)
    assert not list(cache.rglob("last_calls.json"))


def test_on_a_cpu_nothing_is_kept_or_done_by_default(cache, monkeypatch):
    monkeypatch.setattr(ahead, "GPU_ALONE", True)
    first_process()
    assert not list(cache.rglob("last_calls.json"))
    monkeypatch.setattr(ahead, "GPU_ALONE", False)
    keep()
    monkeypatch.setattr(ahead, "GPU_ALONE", True)
    with Process() as process:
        assert process.begin() is None


GIB = 1 << 30


@pytest.mark.parametrize(
    ("total", "free", "fits"),
    [(24, 20, True), (11.6, 9, True), (8, 7.9, False), (11, 10.9, False), (24, 3, False), (80, 5, False)],
)
def test_cards_without_room_are_left_alone(monkeypatch, total, free, fits):
    monkeypatch.setattr(ahead, "GPU_ALONE", True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=total * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * GIB, total * GIB))

    def weight(device="cuda:0", gib=2):
        return SimpleNamespace(device=torch.device(device), numel=lambda: gib * GIB, element_size=lambda: 1)

    def accelerator(*weights):
        return SimpleNamespace(plans={}, module=SimpleNamespace(parameters=lambda: iter(weights)))

    host = SimpleNamespace(prepares_ahead=lambda: True, report=Report())
    asked = ahead.Ahead(host, SimpleNamespace(), lambda: False)
    assert asked._fits(accelerator(weight())) == fits
    # a model that is on its way, or on the CPU at rest
    assert not asked._fits(accelerator(weight(), weight("cpu"))) and not asked._fits(accelerator(weight("cpu")))
    assert not asked._fits(accelerator(weight("meta"))) and not asked._fits(None)


TREE = flatten_call(
    (torch.zeros(2, 4, 8, 8, dtype=torch.float16).to(memory_format=torch.channels_last), 3.5),
    {"y": None, "more": {"a": [torch.zeros(2, 7, dtype=torch.bool), 2], 3: (True, "x")}, "n": 4},
    torch.device("cpu"),
).tree
CALL = KeptCall(Wanted(64, 128, 3), Signature(TREE, ("cuda", torch.bfloat16)))


def test_a_call_is_read_as_it_was_kept(tmp_path):
    kept = KeptCalls(lambda: tmp_path / "kept")
    kept.keep("a UNet", CALL)
    assert kept.of("a UNet") == CALL and kept.of("another") is None
    plain = CALL._replace(signature=Signature(TREE, ()))
    kept.keep("a UNet", plain)
    assert KeptCalls(lambda: tmp_path / "kept").of("a UNet") == plain
    for number in range(kept_calls.KEPT + 2):
        kept.keep(str(number), CALL)
    assert kept.of("a UNet") is None and kept.of("0") is None and kept.of("2") == CALL


@pytest.mark.parametrize("value", [torch.float16, torch.device("cpu"), b"bytes", SimpleNamespace])
def test_what_json_has_not_is_not_kept(tmp_path, value):
    kept = KeptCalls(lambda: tmp_path / "kept")
    const = ("call", (("const", type(value), value),), ())
    with pytest.raises(ValueError, match="constant"):
        kept.keep("a UNet", CALL._replace(signature=Signature(const, ())))
    data = ("call", (("data", type(value), ()),), ())
    with pytest.raises(ValueError, match="argument"):
        kept.keep("a UNet", CALL._replace(signature=Signature(data, ())))
    assert kept.of("a UNet") is None


def entry(**more):
    call = ["call", [["tensor", "half", [2, 4, 8, 8], []]], []]
    return {"size": [64, 64], "images": 1, "mode": [], "call": call, **more}


@pytest.mark.parametrize(
    "broken",
    [
        {"size": [64]},
        {"size": [65, 64]},
        {"size": [0, 64]},
        {"size": [1 << 20, 64]},
        {"size": "64x64"},
        {"images": 0},
        {"images": True},
        {"images": 10**9},
        {"mode": ["tpu", "float16"]},
        {"mode": ["cuda", "nn"]},
        {"mode": ["cuda"]},
        {"call": None},
        {"call": []},
        {"call": ["call", [], []]},
        {"call": ["tensor", "half", [2], []]},
        {"call": ["call", [["tensor", "half", [2, -4], []]], []]},
        {"call": ["call", [["tensor", "half", [1 << 40], []]], []]},
        {"call": ["call", [["tensor", "nn", [2], []]], []]},
        {"call": ["call", [["tensor", "half", [2, 4], [0, 0]]], []]},
        {"call": ["call", [["tensor", "half", [2, 4], [5]]], []]},
        {"call": ["call", [["const", {"a": 1}]], []]},
        {"call": ["call", [["number", "complex"]], []]},
        {"call": ["call", [["data", []]], []]},
        {"call": ["call", [["dict", [[[], ["const", 1]]]]], []]},
    ],
    ids=str,
)
def test_a_file_that_is_not_as_it_should_be_is_left_alone(tmp_path, broken):
    kept = KeptCalls(lambda: tmp_path)
    (tmp_path / "last_calls.json").write_text(json.dumps({"a UNet": entry()}))
    assert kept.of("a UNet") is not None
    (tmp_path / "last_calls.json").write_text(json.dumps({"a UNet": entry(**broken)}))
    assert kept.of("a UNet") is None


@pytest.mark.parametrize("content", ["", "[]", "{", "null", '{"a UNet": 1}', " " * (1 << 17)])
def test_a_file_that_is_none_is_left_alone(tmp_path, content):
    (tmp_path / "last_calls.json").write_text(content)
    assert KeptCalls(lambda: tmp_path).of("a UNet") is None
    KeptCalls(lambda: tmp_path).keep("a UNet", CALL)
    assert KeptCalls(lambda: tmp_path).of("a UNet") == CALL


def test_no_prompt_and_no_name_is_kept(cache):
    keep()
    (file,) = cache.rglob("last_calls.json")
    assert "seed 1" not in file.read_text() and str(cache) not in file.read_text()
    assert list(json.loads(file.read_text())) == [kind for kind in json.loads(file.read_text()) if "UNetModel" in kind]


@pytest.fixture
def sdnext(monkeypatch):
    yield from hosted(monkeypatch)


def test_a_host_of_diffusers_is_ready_as_well_if_its_lock_told(sdnext, monkeypatch):
    # its own lock tells nothing, so it is left alone
    assert host_queue.waiting() is None
    monkeypatch.setattr(sys.modules["modules.call_queue"], "queue_lock", Queue())
    sdnext.modeldata.model_data.sd_model = pipeline()
    session = sdnext.session
    sdnext.image()
    accelerator = session.loaded()
    call = rehearsal.template(accelerator).signature
    KeptCalls().keep(ahead.kind_of(accelerator.module), KeptCall(Wanted(64, 64, 1), call))
    accelerator.forget_plans("as after a start")
    captures = sdnext.captures()
    sdnext.shared.state.job = ""
    sdnext.shared.opts.sfast_ahead = True
    ready = ahead.Ahead(idle._Host(session), session.rehearsals, host_queue.waiting)
    ready.start()
    ready._thread.join(LONG)
    assert session.rehearsals.jobs.status()["state"] == "done"
    assert sdnext.captures() == captures + 1
    sdnext.image()
    assert sdnext.captures() == captures + 1
