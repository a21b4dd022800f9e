"""What a request is answered about its acceleration, and what its images' own metadata say."""

from __future__ import annotations

import copy
import itertools
import json
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")

from hosts.adapters.test_a1111 import host, started, status  # noqa: F401
from hosts.standins.sdnext import hosted, pipeline
from sfast_ext.hosts.a1111 import adapter
from sfast_ext.report import Report
from sfast_ext.ui import settings


def said(result):
    # what the host answers goes through JSON
    return json.loads(json.dumps(result.extra_generation_params))["Stable Fast"]


def test_an_answer_says_how_much_was_accelerated_and_the_image_does_not(host):  # noqa: F811
    started(host)
    first, second = host.request(steps=4), host.request(steps=4)
    assert said(first) == {
        "state": "accelerated", "accelerated": 3, "prepared": 1, "original": 0, "speedup": None, "reason": None,
        "code": None,
    }  # fmt: skip
    assert said(second)["accelerated"] == 4 and said(second)["prepared"] == 0
    for result in (first, second):
        assert result.infotexts == ["Sampler: Euler"] and result.p.extra_generation_params == {"Sampler": "Euler"}


def test_an_answer_says_why_not(host):  # noqa: F811
    started(host)
    host.shared.loaded_hypernetworks = [SimpleNamespace(name='<img onerror="x">')]
    answer = said(host.request(steps=3))
    assert answer["state"] == "not accelerated" and answer["original"] == 3
    assert answer["reason"].startswith('a hypernetwork is active: <img onerror="x">')
    assert answer["code"] == "hypernetwork"
    host.shared.loaded_hypernetworks = []
    host.opts.data["sfast_enabled"] = False
    answer = said(host.request(steps=3))
    assert answer["state"] == "not accelerated" and "switched off" in answer["reason"]


def test_a_request_counts_its_own_calls_alone():
    report = Report()
    report.count("replays")
    with report.tally() as outer:
        report.count("replays", 2)
        with report.tally() as inner:
            report.bypassed("one reason")
            report.bypassed("another")
            report.bypassed("another")
            report.count("weights_copied", 9)
    report.bypassed("later")
    assert (outer.accelerated, outer.bypassed, outer.prepared) == (2, 3, 0)
    assert (inner.accelerated, inner.bypassed, str(inner.reason)) == (0, 3, "another")
    assert Report().as_dict()["counters"] == {}


def test_settings_that_change_pixels_are_in_the_infotext_and_others_are_not(host):  # noqa: F811
    started(host)
    host.opts.data.update(sfast_tolerance=0.05, sfast_graph_memory_mb=512, sfast_check="never")
    (infotext,) = host.request(steps=3).infotexts
    assert infotext == "Sampler: Euler, Stable Fast check: never, Stable Fast tolerance: 0.05"
    host.opts.data["sfast_enabled"] = False
    assert host.request(steps=3).infotexts == ["Sampler: Euler"]


GRIDS = [
    [{"sfast_faster_sums": True}, {"sfast_faster_sums": False}],
    [{"sfast_faster_sums": False}, {"sfast_faster_sums": True}, {}],
    [{"sfast_eight_bits": True}, {"sfast_faster_sums": True}, {"sfast_eight_bits": True, "sfast_faster_sums": True}],
    [{"sfast_preset": "8 bits (faster, details change)"}, {"sfast_preset": "same image"}],
    [{"sfast_tolerance": 0.05}, {"sfast_tolerance": 0.02}, {"sfast_tolerance": 0.04}],
    [{"sfast_check": "always"}, {"sfast_check": "first use"}],
    [{"sfast_faster_sums": True}, {"sfast_enabled": False, "sfast_faster_sums": True}, {}],
]  # fmt: skip


@pytest.mark.parametrize(
    ("cells", "named"), list(zip(GRIDS, itertools.cycle([{"Sampler": "Euler"}, {}]))), ids=str
)
def test_the_images_of_a_grid_name_their_own_settings_alone(host, cells, named):  # noqa: F811
    started(host)
    whole = SimpleNamespace(extra_generation_params=dict(named), options={"steps": 2})
    process = sys.modules["modules.processing"].process_images_inner
    for settings_of_it in cells:
        # as the hosts' plots do: a copy of the request for each image
        p = copy.copy(whole)
        before = dict(host.opts.data)
        host.opts.data.update(settings_of_it)
        expected = {**named, **settings.infotext(settings.config_from(host.opts))}
        if not settings_of_it.get("sfast_enabled", True):
            expected = named
        (infotext,) = process(p).infotexts
        host.opts.data.clear()
        host.opts.data.update(before)
        assert infotext == ", ".join(f"{name}: {value}" for name, value in expected.items())
        assert whole.extra_generation_params == named


def test_a_request_that_is_run_again_names_what_is_on_then(host):  # noqa: F811
    started(host)
    p = SimpleNamespace(extra_generation_params={"Sampler": "Euler", "Stable Fast style": "mine"}, options={"steps": 2})
    process = sys.modules["modules.processing"].process_images_inner
    host.opts.data["sfast_eight_bits"] = True
    assert process(p).infotexts == ["Sampler: Euler, Stable Fast style: mine, Stable Fast 8 bits: True"]
    host.opts.data["sfast_eight_bits"] = False
    # what others call so is theirs
    assert process(p).infotexts == ["Sampler: Euler, Stable Fast style: mine"]


def test_the_dictionary_of_a_request_stays_if_there_is_nothing_to_name(host):  # noqa: F811
    started(host)
    p = SimpleNamespace(extra_generation_params={"Sampler": "Euler"}, options={"steps": 2})
    held = p.extra_generation_params
    sys.modules["modules.processing"].process_images_inner(p)
    assert p.extra_generation_params is held


def test_an_infotext_restores_them(host):  # noqa: F811
    started(host)
    names = {info.infotext: key for key, info in host.opts.data_labels.items() if getattr(info, "infotext", None)}
    assert names == {
        "Stable Fast faster sums": "sfast_faster_sums",
        "Stable Fast 8 bits": "sfast_eight_bits",
        "Stable Fast check": "sfast_check",
        "Stable Fast tolerance": "sfast_tolerance",
    }
    params = {"Steps": "20", "Stable Fast tolerance": "0.05"}
    lossy = {"Stable Fast faster sums": "False", "Stable Fast 8 bits": "False"}
    host.fire("infotext_pasted", "a text", params)
    # what is not named had its default
    assert params == {"Steps": "20", "Stable Fast tolerance": "0.05", "Stable Fast check": "first use", **lossy}
    for name, key in names.items():
        default = host.opts.data_labels[key].default
        assert settings.config_from(SimpleNamespace(**{key: type(default)(params[name])}))
    prompt = {"Prompt": "a lighthouse"}
    host.fire("infotext_pasted", "a text", prompt)
    assert prompt == {"Prompt": "a lighthouse"}


def test_an_error_of_ours_leaves_the_host_its_result(host, monkeypatch):  # noqa: F811
    started(host)
    monkeypatch.setattr("sfast_ext.hosts.answers.Answers._summary", lambda *_: 1 / 0)
    result = host.request(steps=3)
    assert result.extra_generation_params == {"Sampler": "Euler"} and len(result.images) == 1
    assert status()["last_error"]["message"].startswith("ZeroDivisionError")
    host.errors.clear()


def test_nothing_is_left_around_the_host_s_function_after_the_end(host):  # noqa: F811
    before = sys.modules["modules.processing"].process_images_inner
    started(host)
    assert sys.modules["modules.processing"].process_images_inner is not before
    adapter.A1111Session.stop()
    assert sys.modules["modules.processing"].process_images_inner == before


@pytest.fixture
def sdnext(monkeypatch):
    yield from hosted(monkeypatch)


def test_sdnext_answers_and_restores_alike(sdnext):
    mapping = sys.modules["modules.generation_parameters_copypaste"].infotext_to_setting_name_mapping
    assert ("Stable Fast tolerance", "sfast_tolerance") in mapping
    sdnext.modeldata.model_data.sd_model = pipeline()
    sdnext.opts.sfast_tolerance = 0.05
    p = SimpleNamespace(options={"steps": 3}, extra_generation_params={})
    answer = said(sdnext.processing.process_images_inner(p))
    assert (answer["accelerated"], answer["prepared"]) == (2, 1)
    assert p.extra_generation_params == {"Stable Fast tolerance": 0.05}
    sdnext.adapter.SDNextSession.stop()
    assert mapping == [("Parser", "prompt_attention")]
