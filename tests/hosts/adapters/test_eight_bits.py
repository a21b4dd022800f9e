"""8 bits as the user of a WebUI meets them: notes, the badge, the answer, what is kept for `doctor`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")

from hosts.adapters.test_a1111 import host, started, status  # noqa: F401
from sfast_ext import eight_bits, last_start, reasons
from sfast_ext.config import Config
from sfast_ext.hosts.a1111 import adapter
from sfast_ext.hosts.eight_bits import EightBits, doubt, is_for_few_steps
from sfast_ext.report import Report
from sfast_ext.ui import bug_report, words

FEW = [
    "sd_xl_turbo_1.0_fp16.safetensors [e869ac7d69]", "DreamShaperXL_Turbo_dpmppSdeKarras", "TurboVisionXL", "sdxlTurbo",
    "sdxl_lightning_4step_unet", "realvisxlV40_v40LightningBakedvae", "Juggernaut-X-RunDiffusion-Hyper",
    "juggernautXL_versionXInpaint_hyper", "Hyper-SD15-8steps-CFG-lora", "Hyper-SDXL-1step-Unet", "hyper_sd15",
    "LCM_Dreamshaper_v7", "lcm-lora-sdv1-5", "photonLCM_v10", "DMD2_sdxl_4step_lora", "sdxlDMD2", "dmd2",
    "TCD-SD15-LoRA", "pcm_sdxl_normalcfg_8step", "SDXL-2 steps", "sdxl_distilled_v1", "LCM", "TCD", "Turbo",
    "4stepLora", "sdxl_4stepLoRA_v2", "fast8steplora", "SDXL_4Step", "2STEPS", "PCM", "pcm_sd15_smallcfg",
    "animePCM_v1",
    "SDXL Flash", "sdxl-flash-mini", "SDXLFlash_v2", "sd3.5-flash", "flash-sdxl", "Flash_SD15", "flash diffusion",
    "sdxs-512-0.9",
]  # fmt: skip
MANY = [
    "v1-5-pruned-emaonly.safetensors [6ce0161689]", "sd_xl_base_1.0", "juggernautXL_v9", "hyperrealism_v1",
    "hyper-realistic-3", "calcmind", "HyperionMix", "etcd", "revAnimated_v122EOL", "dreamshaper_8", "model_15steps",
    "sd21_20step", "wolcmix", "admdesign", "v1_steps", "mymodel_V2 steps", "v1.4steps", "epoch_4_step_2000",
    "4steps10k",
    "flashback", "camera_flash_photo", "sdxl_flashy", "flashlight_sd", "pcmag", "4stepping", "50steps", "lora_v3-step",
    "Euler a", "DPM++ 2M", "Karras", "SGM Uniform", "", None, 3,
]  # fmt: skip


@pytest.mark.parametrize("name", FEW)
def test_names_of_what_is_made_for_few_steps(name):
    assert is_for_few_steps(name)


@pytest.mark.parametrize("name", MANY)
def test_other_names(name):
    assert not is_for_few_steps(name)


@pytest.mark.parametrize(("gib", "on", "served", "told"), [
    (6, False, True, True), (8, False, True, True), (12, False, True, False), (4, False, True, False),
    (6, True, True, False), (6, False, False, False),
])  # fmt: skip
def test_the_badge_recommends_8_bits_on_cards_that_are_small_for_the_model(gib, on, served, told, monkeypatch):
    unet = torch.nn.Linear(1 << 10, 1 << 10, device="meta", dtype=torch.float16)
    # as large as SDXL's
    monkeypatch.setattr(torch.nn.Linear, "parameters", lambda module: [SimpleNamespace(nbytes=5_135_000_000)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    card = SimpleNamespace(total_memory=gib << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: card)
    told_by = EightBits(Report(), lambda: "a model", (lambda: SimpleNamespace(module=unet)) if served else None)
    told_by._missing = None
    found = told_by.status(Config(eight_bits=on), [])
    assert ("fits this card in 8 bits" in str(found["note"])) == told
    assert not told or found["help"] == "eight-bits"


def request(**values):
    base = {"steps": 20, "sampler_name": "Euler a", "scheduler": "Karras", "prompt": "a lighthouse"}
    return SimpleNamespace(**{**base, **values})


DOUBTS = [
    ({"steps": 8}, "8 bits and few steps (8)"),
    ({"steps": 1}, "8 bits and few steps (1)"),
    ({"sampler_name": "LCM"}, "sampler or schedule LCM"),
    ({"scheduler": "Turbo"}, "sampler or schedule Turbo"),
    ({"prompt": "a <lora:lcm-lora-sdv1-5:1> lighthouse"}, "lcm-lora-sdv1-5"),
    ({"prompt": ["a", "b <lora:sdxl_lightning_8step_lora:0.8>"]}, "sdxl_lightning_8step_lora"),
    ({"refiner_checkpoint": "xl_turbo"}, "xl_turbo"),
    ({"enable_hr": True, "hr_sampler_name": "LCM"}, "LCM"),
    ({"enable_hr": True, "hr_checkpoint_name": "sdxlTurbo"}, "sdxlTurbo"),
]


@pytest.mark.parametrize(("values", "said"), DOUBTS, ids=[str(values) for values, _ in DOUBTS])
def test_a_request_in_which_details_are_likely_to_suffer(values, said):
    found = doubt(request(**values), "v1-5")
    assert said in str(found) and found.code == "eight-bits" and found.remedy


@pytest.mark.parametrize(
    "values",
    [{}, {"steps": 9}, {"steps": 0}, {"steps": None}, {"prompt": None}, {"prompt": "turbo lightning, 4 steps"},
     {"enable_hr": False, "hr_sampler_name": "LCM", "hr_checkpoint_name": "sdxlTurbo"}, {"sampler_name": None}],
    ids=str,
)  # fmt: skip
def test_a_request_of_which_nothing_is_known(values):
    assert doubt(request(**values), "v1-5") is None


def test_a_request_without_any_of_these_fields():
    assert doubt(SimpleNamespace(), None) is None
    assert "sdxlTurbo" in str(doubt(SimpleNamespace(), "sdxlTurbo"))


ON, OFF = Config(eight_bits=True), Config()
LAYERS = [{"eight_bits": {"layers": 40, "kept": [["a.to_out", 0.05]], "bytes": 3 << 20}}]


@pytest.fixture
def able(monkeypatch):
    monkeypatch.setattr(eight_bits, "refusal", lambda: None)


def test_the_note_is_of_the_last_image_and_of_the_model(able):
    name = ["v1-5"]
    report = Report()
    ours = EightBits(report, lambda: name[0])
    assert ours.status(ON, [])["note"] is None
    for _ in range(3):
        assert ours.begin(request(steps=4), ON) is not None
    assert "few steps (4)" in ours.status(ON, LAYERS)["note"]
    # once on the console, whatever the number
    ours.begin(request(steps=6), ON)
    assert len(report.as_dict()["events"]) == 1
    assert ours.begin(request(), ON) is None and ours.status(ON, LAYERS)["note"] is None
    # before the first image of it
    name[0] = "sdxlTurbo"
    told = ours.status(ON, [])
    assert "sdxlTurbo" in told["note"] and "".join(told["note_parts"]) == told["note"] and told["help"] == "eight-bits"
    assert "sdxlTurbo" not in ours.status(ON, [], names=False)["note"]


def test_a_request_may_have_them_for_itself(able):
    ours = EightBits(Report(), lambda: "v1-5")
    ours.begin(request(steps=4), ON)
    assert "few steps (4)" in ours.status(OFF, [])["note"] and not ours.status(OFF, [])["on"]
    assert ours.begin(request(steps=4), OFF) is None and ours.status(OFF, [])["note"] is None
    assert ours.begin(request(steps=4), Config(enabled=False, eight_bits=True)) is None


def test_a_machine_that_cannot_says_why(monkeypatch):
    monkeypatch.setattr(eight_bits, "refusal", lambda: reasons.OLD_FOR_EIGHT_BITS("7.0", "7.5"))
    ours = EightBits(Report(), lambda: "v1-5")
    note = ours.begin(request(steps=4), ON)
    assert str(note).startswith("8 bits are on and not used: the GPU has compute capability 7.0")
    assert ours.status(ON, [])["note"] == str(note)
    # what runs in them is not denied
    assert "not used" not in (ours.status(ON, LAYERS)["note"] or "")


def test_why_no_plan_has_them_is_what_the_accelerator_says(able):
    ours = EightBits(Report(), lambda: "v1-5")
    why = {"code": "eight-bits", "text": "8 bits are not used: the GPU has too little memory", "values": []}
    refused = [{"eight_bits": {"layers": 0, "kept": [], "bytes": 0, "reason": why}}]
    told = ours.status(ON, [{"name": "VAE decoder"}, *refused])
    assert told["note"] == why["text"] == "".join(told["note_parts"]) and told["help"] == "eight-bits"
    # it is of no interest while they are off, or if another network has them
    assert ours.status(OFF, refused)["note"] is None and ours.status(ON, [*refused, *LAYERS])["note"] is None
    used = [{"eight_bits": {"layers": 4, "kept": [], "bytes": 0, "reason": None}}]
    assert ours.status(ON, used)["note"] is None


def test_what_ran_is_kept_for_doctor_once(able, tmp_path, monkeypatch):
    monkeypatch.setattr(last_start, "FOLDER", lambda: tmp_path / "cache")
    written = []
    own = eight_bits.keep
    monkeypatch.setattr(eight_bits, "keep", lambda found: written.append(found) or own(found))
    ours = EightBits(Report(), lambda: "v1-5")
    ours.begin(request(), OFF)
    ours.end(lambda: pytest.fail("8 bits are off"))
    ours.begin(request(), ON)
    ours.end(list)
    for _ in range(2):
        ours.end(lambda: LAYERS)
    assert len(written) == 1 and eight_bits.read()["layers"] == 40
    monkeypatch.setattr(last_start, "FOLDER", lambda: 1 / 0)
    report = Report()
    other = EightBits(report, lambda: "v1-5")
    other.begin(request(), ON)
    with pytest.raises(ZeroDivisionError):
        other.end(lambda: LAYERS)
    monkeypatch.setattr(eight_bits, "keep", lambda found: (_ for _ in ()).throw(OSError("full")))
    other = EightBits(report, lambda: "v1-5")
    other.begin(request(), ON)
    other.end(lambda: LAYERS)
    assert "OSError: full" in report.as_dict()["events"][-1]["message"]


def test_the_session_says_it_in_the_status_the_badge_the_report_and_the_answer(host, able, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(last_start, "FOLDER", lambda: tmp_path / "cache")
    started(host)
    session = adapter.A1111Session.running
    assert status()["eight_bits"] == {
        "on": False, "layers": 0, "kept": [], "bytes": 0, "note": None, "note_parts": [], "help": None,
    }  # fmt: skip
    host.opts.data["sfast_eight_bits"] = True
    monkeypatch.setattr(session.eight_bits, "_model_name", lambda: "secretTurboMix")
    # the accelerator has a reason to make no use of them on a CPU
    monkeypatch.setattr("sfast_ext.hosts.eight_bits._told", lambda accelerators: [])
    result = host.request(steps=4)
    assert result.infotexts == ["Sampler: Euler, Stable Fast 8 bits: True"]
    assert "secretTurboMix" in result.extra_generation_params["Stable Fast"]["note"]
    told = status()
    assert told["badge"]["note"] == told["eight_bits"]["note"] and told["badge"]["note_help"] == "eight-bits"
    assert session.loaded().config.eight_bits
    said = session.bug_report()
    assert "8 bits\n  8 bits and <name>, which is made for few steps" in said and "secretTurboMix" not in said
    host.opts.data["sfast_eight_bits"] = False
    result = host.request(steps=4)
    assert "note" not in result.extra_generation_params["Stable Fast"] and status()["badge"]["note"] is None


def test_the_answer_says_why_they_were_not_used(host, able, monkeypatch):  # noqa: F811
    started(host)
    host.opts.data["sfast_eight_bits"] = True
    why = {"code": "eight-bits", "text": "8 bits are not used: the GPU has too little memory", "values": []}
    told = [{"layers": 0, "kept": [], "bytes": 0, "reason": why}]
    monkeypatch.setattr("sfast_ext.hosts.eight_bits._told", lambda accelerators: told)
    assert host.request(steps=4).extra_generation_params["Stable Fast"]["note"] == why["text"]
    host.opts.data["sfast_enabled"] = False
    assert "note" not in host.request(steps=4).extra_generation_params["Stable Fast"]


def test_the_badge_says_8_bits_if_the_last_image_had_layers_in_them():
    plan = {"label": "512x512", "ms_before": 3.0, "ms_after": 1.0, "speedup": 3.0, "replays": 2, "last_pass": True}
    found = {
        "enabled": True, "no_gpu": None, "accelerators": [{"plans": [plan], "calls_per_s": 12.0}],
        "last_pass": {"accelerated": 3, "bypassed": 0, "prepared": 0}, "reasons_listed": [],
    }  # fmt: skip
    plain = "3.0x, 12 it/s"
    # plans with and without them are kept next to each other: what counts is that of the last image
    told = f"{plain}, 8 bits"
    for fused, text in (
        ({}, plain),
        ({"eight_bits": 0}, plain),
        ({"eight_bits": 9}, told),
        ({"eight_bits": 0, "eight_bits_conv": 4}, told),
    ):
        plan["fused"] = fused
        said = words.badge({**found, "eight_bits": {"layers": 9}})
        assert said["text"] == text == "".join(said["text_parts"])
    # switched off, it says that alone
    off = words.badge({**found, "enabled": False, "eight_bits": {"note": "x", "note_parts": ["x"], "help": "a"}})
    assert off["note"] is None


def test_the_report_lists_every_layer_that_is_kept():
    kept = [[f"layer {n}", 0.5] for n in range(20)]
    said = bug_report._eight_bits({"layers": 3, "kept": kept, "bytes": 0, "note": None})
    assert said[:2] == ["", "8 bits"] and len([line for line in said if "    layer" in line]) == 20
    assert bug_report._eight_bits(None) == bug_report._eight_bits({**eight_bits.NONE, "note": None}) == []
