"""The text for a bug report has what a fault needs, and nothing that belongs to the user."""

from __future__ import annotations

from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath

import pytest

from sfast_ext.hosts.reasons import HYPERNETWORK, SD_UNET
from sfast_ext.reasons import Private
from sfast_ext.report import Report
from sfast_ext.ui import bug_report, words
from sfast_ext.ui.bug_report import without_paths


@pytest.fixture(autouse=True)
def somebody(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: PurePosixPath("/home/Ann Other"))
    monkeypatch.setattr(bug_report.getpass, "getuser", lambda: "annother")


STATUS = {
    "version": "0.2",
    "host": {"name": "AUTOMATIC1111 WebUI", "version": "v1.10.1"},
    "environment": {"gpu": "a card", "torch": "2.7", "xformers": None, "known_bad": ["Triton does not import"]},
    "badge": {"state": "on", "text": "2.1x", "detail": "The last image was accelerated."},
    "model": "my secret face model.safetensors",
    "accelerators": [
        {
            "name": "unet",
            "module": "UNetModel",
            "device": "cuda:0",
            "kernels_disabled": {"geglu": "no"},
            "kernels_declined": {"conv2d": {"a dtype that it does not take": 3}},
            "plans": [
                {
                    "label": "512x512, 1 image",
                    "signature": "f16[2,4,64,64]",
                    "ms_before": 31.0,
                    "ms_after": 14.8,
                    "speedup": 2.1,
                    "state": "replaying",
                    "replays": 20,
                    "error": 0.001,
                }
            ],
        }
    ],
    "reasons_listed": [{"reason": "Hypertile is on", "calls": 9, "calls_last": 3, "seconds_ago": 1.0}],
    "counters": {"replays": 20},
    "events": [{"stage": "plan", "message": f"event {i}"} for i in range(60)],
    "last_error": {
        "stage": "capture",
        "message": "m",
        "traceback": 'File "/home/Ann Other/webui/extensions/x/y.py", line 3\\n  File "D:\\\\AI\\\\annother\\\\z.py"',
    },
}


def test_it_has_what_a_fault_needs():
    text = bug_report.text(STATUS, {"sfast_enabled": True, "sfast_check": "always"})
    assert "kernel conv2d declined operands, 3 times: a dtype that it does not take" in text
    for part in (
        "Stable Fast 0.2 in AUTOMATIC1111 WebUI v1.10.1", "gpu: a card", "torch: 2.7", "note: Triton does not import",
        "sfast_check: 'always'", "512x512, 1 image: 2.1x (31.0 -> 14.8 ms a step)", "f16[2,4,64,64]",
        "kernel geglu is not used: no", "3 / 9: Hypertile is on", "replays: 20", "event 59", "Last error, in capture",
        "extensions", "y.py",
    ):  # fmt: skip
        assert part in text
    assert "event 19" not in text and "xformers" not in text


def test_it_names_neither_the_user_nor_the_model():
    text = bug_report.text(STATUS, {})
    for part in ("Ann Other", "annother", "secret", "/home"):
        assert part not in text


@pytest.mark.parametrize("kind", [HYPERNETWORK, SD_UNET])
@pytest.mark.parametrize("name", ["secret face", "secret; one secret", "[TRT] secret"])
def test_a_reason_in_it_names_no_file_of_the_user_s(kind, name):
    report = Report()
    report.bypassed(kind(Private(name)))
    status = {**STATUS, "enabled": True, "no_gpu": None, **report.as_dict(names=False)}
    text = bug_report.text({**status, "badge": words.badge(status)}, {})
    told = kind.template.partition(":")[0]
    assert "secret" not in text and text.count(told) == 4 and kind.remedy in text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a hypernetwork is active: x; see Settings > SD Unet", None),
        ("the ratio is true/false, 31 ms/step", None),
        ("http://127.0.0.1:7860/sfast/v1/status", None),
        ("n/a and a / b", None),
        ("in extensions/x.py", None),
        ("'/srv/me/webui/x.py'", "'.../webui/x.py'"),
        (r"C:\Users\me\webui\x.py failed", ".../webui/x.py failed"),
        (r"\\server\share\me\x.py", ".../me/x.py"),
        ("(/srv/me/a b)", "(.../me/a b)"),
        ("/home/Ann Other/.cache/sfast_ext/k", "~/.cache/sfast_ext/k"),
    ],
)
def test_of_a_path_the_last_two_parts_are_left(text, left):
    assert without_paths(text) == (text if left is None else left)


@pytest.mark.parametrize(
    ("home", "text", "left"),
    [
        (r"C:\Users\Ann Other", r"C:\Users\Ann Other\AppData\Local\x y", r"~\AppData\Local\x y"),
        # as Python quotes it in the message of an OSError
        (
            r"C:\Users\Ann Other",
            r"[Errno 13] denied: 'C:\\Users\\Ann Other\\AppData\\x'",
            r"[Errno 13] denied: '~\\AppData\\x'",
        ),
        (r"C:\Users\Ann Other", "c:/users/ann other/webui/x.py", "~/webui/x.py"),
        (r"C:\Users\Ann Other", r"\\?\C:\Users\Ann Other\x.py", r"~\x.py"),
        (r"\\server\homes\Ann Other", r"'\\\\server\\homes\\Ann Other\\x.py'", r"'~\\x.py'"),
        # of somebody else
        (r"C:\Users\Ann", r"'C:\\Users\\Annabel\\webui\\x.py'", "'.../webui/x.py'"),
        ("/home/ann", r"'D:\\Ann Other\\My Models\\secret face\\x.safetensors'", "'.../secret face/x.safetensors'"),
        ("/home/ann", '"/srv/Ann Other/webui/x.py" line 3', '".../webui/x.py" line 3'),
    ],
)
def test_the_user_s_folder_as_windows_and_python_write_it(monkeypatch, home, text, left):
    kind: type[PurePath] = PureWindowsPath if "\\" in home else PurePosixPath
    monkeypatch.setattr(Path, "home", lambda: kind(home))
    assert without_paths(text) == left
