"""The last image, made again with and without the extension: from a copy of its request, by the host's own function."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")
pytest.importorskip("PIL")

from PIL import Image

from hosts.adapters.test_a1111 import count, host, started, status  # noqa: F401
from hosts.standins.sdnext import hosted, pipeline
from sfast_ext.hosts import per_request
from sfast_ext.hosts.a1111 import adapter
from sfast_ext.hosts.last_request import LABELS
from sfast_ext.hosts.session import Session
from sfast_ext.ui import settings
from sfast_ext.ui.requests import Refused

KEY = "sfast_enabled"


class Request:
    """As hosts have them."""

    def __init__(self, **options):
        self.options, self.prompt, self.seed, self.subseed = options, "a dog", -1, -1
        self.extra_generation_params, self.override_settings = {"Sampler": "Euler"}, {}
        self.override_settings_restore_afterwards, self.n_iter = True, 4
        self.do_not_save_samples = self.do_not_save_grid = False
        self.closed = 0

    def close(self):
        self.closed += 1


@pytest.fixture
def world(host):  # noqa: F811
    """The stand-in, with the function that its scripts call."""
    host.made, host.random, host.before, host.script = [], False, lambda p: None, None
    processing = sys.modules["modules.processing"]

    def process_images(p):
        host.before(p)
        if host.script is not None:
            host.script.before_process(p, *getattr(p, "script_args", ()))
        stored = {key: getattr(host.opts, key) for key in p.override_settings}
        for key, value in p.override_settings.items():
            setattr(host.opts, key, value)
        try:
            return processing.process_images_inner(p)
        finally:
            if p.override_settings_restore_afterwards:
                for key, value in stored.items():
                    setattr(host.opts, key, value)

    def process_images_inner(p):
        # what the inner function does with a request, and what its result has
        p.seed = 77 if p.seed == -1 else p.seed
        result = host._process(p)
        host.made.append(p)
        pixels = (result.images[0][0, :3].clamp(-2, 2) * 60 + 128).to(torch.uint8).permute(1, 2, 0).numpy()
        result.images = [Image.fromarray(pixels)]
        first = p.seed[0] if isinstance(p.seed, list) else p.seed
        result.all_seeds, result.all_subseeds = [first, first + 1], [5, 6]
        result.all_prompts = [f"{p.prompt} {len(host.made) if host.random else ''}"]
        return result

    processing.process_images, processing.process_images_inner = process_images, process_images_inner
    started(host)
    host.session = adapter.A1111Session.running
    host.script = None if host.session.script is None else host.session.script()
    host.image = lambda **options: process_images(Request(steps=3, **options))
    return host


def compared(world):
    world.session.last_request.compare()
    until = time.monotonic() + 60
    jobs = world.session.rehearsals.jobs
    while jobs.status()["state"] in ("waiting", "running"):
        assert time.monotonic() < until
        time.sleep(0.01)
    return jobs.status()


def test_without_an_image_there_is_nothing_to_compare(world):
    with pytest.raises(Refused, match="make one image first"):
        world.session.last_request.compare()
    assert world.session.last_request.compared() is None and world.session.rehearsals.jobs.status() is None


def test_both_images_are_those_of_the_last_request_and_nothing_is_saved(world):
    world.image()
    first = world.made[-1]
    job = compared(world)
    assert job["state"] == "done" and [row["label"] for row in job["rows"]] == list(LABELS), job
    original, preparing, accelerated = world.made[-3:]
    for p in (original, preparing, accelerated):
        assert p is not first and p.seed == 77 and p.subseed == 5 and p.prompt == "a dog" and p.n_iter == 1
        assert p.do_not_save_samples and p.do_not_save_grid and p.closed == 1
    assert [p.override_settings[KEY] for p in (original, preparing, accelerated)] == [False, True, True]
    found = world.session.last_request.compared().told
    assert found["accelerated"]["steps"] == {"accelerated": 3, "prepared": 0, "original": 0}
    assert found["original"]["steps"] == {"accelerated": 0, "prepared": 0, "original": 0}
    assert found["same_request"] and found["largest_difference"] <= 1 and found["mean_difference"] < 0.1
    assert found["times"] == pytest.approx(found["original"]["seconds"] / found["accelerated"]["seconds"], rel=0.1)
    assert all(each.startswith(b"\x89PNG") for each in world.session.last_request.compared().files.values())
    # its own images are not the last ones
    assert world.session.last_request._request.n_iter == 4
    # the user's own request is as it was
    assert not first.do_not_save_samples and first.n_iter == 4 and KEY not in first.override_settings
    assert status()["enabled"] and status()["last_error"] is None


@pytest.mark.thinned("sizes", "enabled")
@pytest.mark.parametrize("sizes", [(8,), (8, 8), (8, 8, 16), (16, 8)])
@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_compared_need_not_be_earned(world, monkeypatch, sizes, enabled):
    # as on a GPU
    from_options, as_given = settings.config_from, Session.config
    monkeypatch.setattr(settings, "config_from", lambda *args: replace(from_options(*args), allow_cpu=False))
    monkeypatch.setattr(Session, "config", lambda self: replace(as_given(self), allow_cpu=True))
    assert world.session.config().earned
    setattr(world.opts, KEY, enabled)
    for size in sizes:
        world.image(size=size)
    assert compared(world)["state"] == "done"
    found = world.session.last_request.compared().told
    assert found["accelerated"]["steps"] == {"accelerated": 3, "prepared": 0, "original": 0}
    assert found["original"]["steps"]["accelerated"] == 0 and world.session.config().earned
    setattr(world.opts, KEY, True)
    captures = count("captures")
    world.image(size=24)
    assert count("captures") == captures


def test_the_size_is_ready_after_it(world):
    world.image()
    assert compared(world)["state"] == "done"
    captures = count("captures")
    world.image()
    assert count("captures") == captures and status()["last_pass"] == {"accelerated": 3, "bypassed": 0, "prepared": 0}


def test_what_needed_no_preparation_is_made_once(world, monkeypatch):
    world.image()
    own = world.session.last_request.again

    def again(accelerated):
        made = own(accelerated)
        made.steps["prepared"] = 0
        return made

    monkeypatch.setattr(world.session.last_request, "again", again)
    before = len(world.made)
    assert compared(world)["state"] == "done"
    assert len(world.made) == before + 2


CHANGES = {
    "plain": lambda p: None,
    "off": lambda p: setattr(p, "override_settings", {KEY: False}),
    "on": lambda p: setattr(p, "override_settings", {KEY: True, "sfast_tolerance": 0.05}),
    "none": lambda p: setattr(p, "override_settings", None),
    # of SD.Next, which restores nothing after its images
    "grid": lambda p: setattr(p, "override_settings_restore_afterwards", False),
    "asks on": lambda p: setattr(p, "script_args", ({"enabled": True},)),
    "asks off": lambda p: setattr(p, "script_args", ({"enabled": False},)),
    "asks by a word": lambda p: setattr(p, "script_args", (False,)),
    "seed": lambda p: setattr(p, "seed", 9),
    "seeds": lambda p: setattr(p, "seed", [4, 5]),
}


@pytest.mark.parametrize(
    ("change", "enabled"), [*((name, True) for name in CHANGES), *((name, False) for name in ("plain", "off", "on"))]
)
def test_the_switch_is_that_of_the_comparison_and_is_put_back(world, change, enabled):
    p = Request(steps=3)
    CHANGES[change](p)
    sys.modules["modules.processing"].process_images_inner(p)
    world.opts.sfast_enabled = enabled
    assert compared(world)["state"] == "done"
    assert world.opts.sfast_enabled is enabled
    found = world.session.last_request.compared().told
    assert found["accelerated"]["steps"]["accelerated"] == 3 and found["original"]["steps"]["accelerated"] == 0
    assert found["same_request"]


def test_no_setting_of_a_request_of_a_grid_stays(world):
    """SD.Next's plot restores its settings after all of its images, not after each."""
    p = Request(steps=3)
    p.override_settings, p.override_settings_restore_afterwards = {"sfast_tolerance": 0.07}, False
    sys.modules["modules.processing"].process_images_inner(p)
    before = world.opts.sfast_tolerance
    assert compared(world)["state"] == "done"
    assert world.opts.sfast_tolerance == before != 0.07


def test_a_prompt_of_parts_at_random_is_not_called_the_same(world):
    world.random = True
    world.image()
    assert compared(world)["state"] == "done"
    assert not world.session.last_request.compared().told["same_request"]


def test_the_request_is_that_before_the_host_has_worked_on_it(world):
    p = Request(steps=3)
    p.init_images, p.more = ["an image"], {"a": 1}

    def works(given):
        given.init_images.append("a mask")
        given.more["b"] = 2
        given.extra_generation_params["Noise"] = 1
        given.prompt = "changed"
        return SimpleNamespace(images=["an image"], all_seeds=[1])

    world.session.last_request.around(works, p)
    kept = world.session.last_request._request
    assert kept.init_images == ["an image"] and kept.more == {"a": 1} and kept.prompt == "a dog"
    assert "Noise" not in kept.extra_generation_params and p.init_images == ["an image", "a mask"]


def test_a_request_within_another_is_a_part_of_it(world):
    faces, outer = Request(steps=2), Request(steps=3)
    last = world.session.last_request

    def draws(p):
        last.around(lambda inner: SimpleNamespace(images=["a face"], all_seeds=[3]), faces)
        return SimpleNamespace(images=["whole"], all_seeds=[8])

    last.around(draws, outer)
    assert last._request.seed == 8 and last._request.options == {"steps": 3}
    before = last._request

    def ends(p):
        draws(p)
        return SimpleNamespace(images=[])

    # an interruption after the faces
    last.around(ends, Request(steps=3))
    assert last._request is before


@pytest.mark.long(but=[0])
@pytest.mark.parametrize("result", [None, SimpleNamespace(images=[]), SimpleNamespace()])
def test_a_request_without_an_image_keeps_the_one_before(world, result):
    world.image()
    before = world.session.last_request._request
    assert world.session.last_request.around(lambda p: result, Request(steps=1)) is result
    assert world.session.last_request._request is before


def test_a_request_that_cannot_be_copied_is_made_as_ever(world):
    class Odd(Request):
        def __copy__(self):
            raise TypeError("not to be copied")

    result = SimpleNamespace(images=["an image"])
    assert world.session.last_request.around(lambda p: result, Odd()) is result
    assert world.session.last_request._request is None


def test_an_exception_of_the_host_is_the_host_s(world):
    def fails(p):
        raise ValueError("no such sampler")

    with pytest.raises(ValueError, match="no such sampler"):
        world.session.last_request.around(fails, Request())
    assert not world.session.last_request._within


def test_an_interruption_shows_nothing(world):
    world.image()
    world.before = lambda p: world.shared.state.interrupt()
    assert compared(world)["state"] == "cancelled"
    assert world.session.last_request.compared() is None
    world.before = lambda p: None
    assert compared(world)["state"] == "done"


def test_a_failure_of_the_host_is_told_and_the_switch_is_as_it_was(world):
    world.image()

    def fails(p):
        world.opts.sfast_enabled = False
        raise RuntimeError("out of paper")

    world.before = fails
    job = compared(world)
    assert job["state"] == "failed" and "out of paper" in job["message"]
    assert world.opts.sfast_enabled is True and not sys.modules["modules.call_queue"].queue_lock.locked()


def test_a_host_that_makes_nothing_says_so(world):
    world.image()
    sys.modules["modules.processing"].process_images = lambda p: None
    job = compared(world)
    assert job["state"] == "failed" and "made no image" in job["message"]


def test_only_one_job_at_a_time(world):
    world.image()
    gate = threading.Event()
    world.before = lambda p: gate.wait(30)
    world.session.last_request.compare()
    with pytest.raises(Refused, match="another job"):
        world.session.last_request.compare()
    gate.set()
    while world.session.rehearsals.jobs.status()["state"] in ("waiting", "running"):
        time.sleep(0.01)


def test_without_a_gpu_that_is_said(world):
    world.image()
    world.opts.sfast_allow_cpu = False
    with pytest.raises(Refused, match="nothing is accelerated on this machine"):
        world.session.last_request.compare()


def test_nothing_is_kept_after_the_scripts_are_unloaded(world):
    world.image()
    assert compared(world)["state"] == "done"
    last = world.session.last_request
    adapter.A1111Session.stop()
    assert last._request is None and last.compared() is None


@pytest.fixture
def sdnext(monkeypatch):
    yield from hosted(monkeypatch)


def test_a_host_of_diffusers_is_compared_as_well(sdnext, monkeypatch):
    sdnext.modeldata.model_data.sd_model = pipeline()
    session, requests = sdnext.session, []

    own = sdnext.processing.process_images

    def process_images(p=None, **job):
        if p is None:
            return own(**job)
        requests.append((p.override_settings[KEY], p.seed))
        for key, value in p.override_settings.items():
            setattr(sdnext.shared.opts, key, value)
        sdnext.image()
        setattr(sdnext.shared.opts, KEY, True)
        image = Image.new("RGB", (8, 8), (len(requests), 0, 0))
        return SimpleNamespace(images=["a grid", image], index_of_first_image=1, all_seeds=[3], all_prompts=["a"])

    sdnext.image()
    p = Request()
    session.last_request.around(lambda p: SimpleNamespace(images=["an image"], all_seeds=[3]), p)
    monkeypatch.setattr(sdnext.processing, "process_images", process_images)
    job = compared(SimpleNamespace(session=session))
    assert job["state"] == "done", job
    assert requests[0] == (False, 3) and requests[-1] == (True, 3)
    found = session.last_request.compared().told
    assert found["accelerated"]["steps"]["accelerated"] > 0 and found["original"]["steps"]["accelerated"] == 0
    assert found["largest_difference"] == len(requests) - 1


def test_what_is_forced_counts_over_what_a_request_has_chosen():
    p = SimpleNamespace(override_settings={"a": 1})
    setattr(p, per_request.FORCED, {KEY: False})
    per_request.apply(p, {"enabled": True})
    assert p.override_settings == {"a": 1, KEY: False}
