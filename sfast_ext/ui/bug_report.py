"""The text for a bug report: what is needed to find a fault, without what belongs to the user."""

from __future__ import annotations

import getpass
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sfast_ext import eight_bits
from sfast_ext.ui.words import plan_words

EVENTS = 40
"""So many of the last events are in it."""
ENVIRONMENT = (
    "gpu", "compute_capability", "gpu_memory_mb", "torch", "cuda", "driver", "cudnn", "nvrtc", "triton", "triton_error",
    "xformers", "python", "platform",
)  # fmt: skip
# an absolute path on either system, not the rest of an address; Python doubles Windows' separators in messages
_START = r"(?<![\w:/\\.~])(?:\\{2,4}[?.]\\+)?(?:[A-Za-z]:[\\/]+|\\{2,4}|/)"
_PATH = re.compile(rf"{_START}(?:[^\s\\/'\"<>|:*?]+[\\/]+)+[^\s\\/'\"<>|:*?]*")
# in quotes it may have blanks in it
_QUOTED = re.compile(rf"(['\"])({_START}(?:[^\\/'\"<>|:*?\n]+[\\/]+)+[^\\/'\"<>|:*?\n]*)\1")


def without_paths(text: str) -> str:
    """A text whose absolute paths have their last two parts only, and that does not name the user."""
    if "/" not in text and "\\" not in text:
        return text
    for own in _own():
        text = own.sub("~", text)
    text = _QUOTED.sub(lambda found: f"{found[1]}{_end(found[2])}{found[1]}", text)
    return _PATH.sub(lambda found: _end(found.group()), text)


def _end(path: str) -> str:
    """The last two parts of a path."""
    return "/".join(["...", *_parts(path)[-2:]])


def _parts(path: str) -> list[str]:
    return [part for part in re.split(r"[\\/]+", path) if part]


def _own() -> list[re.Pattern[str]]:
    """The user's folder, which may have blanks in it; on Windows with any separators, and in any case."""
    try:
        home = str(Path.home())
    except (OSError, RuntimeError, KeyError):
        return []
    if len(_parts(home)) < 2:
        return []
    if "\\" not in home:
        return [re.compile(re.escape(home))]
    drive = r"(?:\\{2,4}\?\\+)?" if home[1:2] == ":" else r"\\{2,4}"
    return [re.compile(drive + r"(?:\\+|/)".join(map(re.escape, _parts(home))) + r"(?![\w~-])", re.I)]


def _anonymous(text: str) -> str:
    """`without_paths`, and without the user's name if it stands by itself."""
    text = without_paths(text)
    try:
        user = getpass.getuser()
    except Exception:  # no name in the environment and none in the system's list
        return text
    return re.sub(rf"\b{re.escape(user)}\b", "<user>", text) if len(user) > 2 else text


def text(status: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The report.

    Args:
        status: of the session, without names that belong to the user; see `Report.as_dict`. The name of its model,
            which may say what images are made, is left out.
        settings: the options of the extension by their keys.
    """
    known = status["environment"]
    lines = [
        f"Stable Fast {status['version']} in {status['host']['name']} {status['host']['version']}",
        f"State ({status['badge']['state']}): {status['badge']['text']}",
        status["badge"]["detail"],
        *(f"note: {sentence}" for sentence in status["host"].get("remarks", ())),
        *(f"{name}: {known[name]}" for name in ENVIRONMENT if known.get(name) is not None),
        *(f"note: {sentence}" for sentence in known.get("known_bad", ())),
        "",
        "Settings",
        *(f"  {key}: {value!r}" for key, value in settings.items()),
        "",
        "Plans",
        *_plans(status),
        *_eight_bits(status.get("eight_bits")),
        "",
        "Not accelerated (steps of the last image / since the start)",
        *(f"  {row['calls_last']} / {row['calls']}: {row['reason']}" for row in status["reasons_listed"]),
        "",
        "Counters",
        *(f"  {name}: {n}" for name, n in status["counters"].items()),
        "",
        "Last events",
        *(f"  {event['stage']}: {event['message']}" for event in status["events"][-EVENTS:]),
    ]
    error = status.get("last_error")
    if error:
        lines += ["", f"Last error, in {error['stage']}", *str(error.get("traceback", error["message"])).splitlines()]
    return "\n".join(_anonymous(line) for line in lines) + "\n"


def _eight_bits(told: Mapping[str, Any] | None) -> list[str]:
    if told is None:
        return []
    said = [*([told["note"]] if told["note"] else []), *eight_bits.lines(told, most=None)]
    return ["", "8 bits", *(f"  {line}" for line in said)] if said else []


def _plans(status: Mapping[str, Any]) -> list[str]:
    found = []
    for each in status["accelerators"]:
        found.append(f"  {each.get('name')} ({each.get('module')} on {each.get('device')})")
        for plan in each.get("plans", ()):
            unit = "step" if each.get("steps", True) else "call"
            said, times = plan_words(plan, unit), f"{plan['replays']} {unit}s"
            found.append(f"    {said}; {plan['state']}, {times}, error {plan['error']}")
            found.append(f"      {plan['signature']}")
        for name, why in each.get("kernels_disabled", {}).items():
            found.append(f"    kernel {name} is not used: {why}")
    # the same for all: kernels are those of the process
    for name, reasons in dict(next((e.get("kernels_declined", {}) for e in status["accelerators"]), {})).items():
        found += [f"  kernel {name} declined operands, {count} times: {why}" for why, count in reasons.items()]
    return found
