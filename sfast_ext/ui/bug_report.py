"""The text for a bug report: what is needed to find a fault, without what belongs to the user."""

from __future__ import annotations

import getpass
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sfast_ext.ui.words import plan_words

EVENTS = 40
"""So many of the last events are in it."""
ENVIRONMENT = (
    "gpu", "compute_capability", "gpu_memory_mb", "torch", "cuda", "driver", "cudnn", "nvrtc", "triton", "triton_error",
    "xformers", "python", "platform",
)  # fmt: skip
# reasons that name files of the user's, which say what pictures are made; a name may have a semicolon in it
_NAMED = re.compile(r"\b(a hypernetwork is active|another UNet is active): .*?(?=; (?:remove it|set Settings)|$)")
# an absolute path on either system, not the rest of an address
_PATH = re.compile(r"(?<![\w:/\\.~])(?:[A-Za-z]:[\\/]|\\\\|/)(?:[^\s\\/'\"<>|:*?]+[\\/]+)+[^\s\\/'\"<>|:*?]*")


def without_paths(text: str) -> str:
    """A text whose absolute paths have their last two parts only, and that does not name the user."""
    if "/" not in text and "\\" not in text:
        return text
    for own in _own():
        text = text.replace(own, "~")
    return _PATH.sub(lambda found: "/".join([".../", *_parts(found.group())[-2:]]).replace("//", "/"), text)


def _parts(path: str) -> list[str]:
    return [part for part in re.split(r"[\\/]+", path) if part]


def _own() -> list[str]:
    """The user's folder, which may have blanks in it."""
    try:
        home = str(Path.home())
    except (OSError, RuntimeError, KeyError):
        return []
    return [home] if len(_parts(home)) > 1 else []


def _anonymous(text: str) -> str:
    """`without_paths`, without names of models, and without the user's name where it stands by itself."""
    text = without_paths(_NAMED.sub(r"\1: <name>", text))
    try:
        user = getpass.getuser()
    except Exception:  # no name in the environment and none in the system's list
        return text
    return re.sub(rf"\b{re.escape(user)}\b", "<user>", text) if len(user) > 2 else text


def text(status: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The report.

    Args:
        status: of the session; its model's name, which may say what pictures are made, is left out.
        settings: the options of the extension by their keys.
    """
    known = status["environment"]
    lines = [
        f"Stable Fast {status['version']} in {status['host']['name']} {status['host']['version']}",
        f"State ({status['badge']['state']}): {status['badge']['text']}",
        status["badge"]["detail"],
        *(f"{name}: {known[name]}" for name in ENVIRONMENT if known.get(name) is not None),
        *(f"note: {sentence}" for sentence in known.get("known_bad", ())),
        "",
        "Settings",
        *(f"  {key}: {value!r}" for key, value in settings.items()),
        "",
        "Plans",
        *_plans(status),
        "",
        "Not accelerated (steps of the last picture / since the start)",
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


def _plans(status: Mapping[str, Any]) -> list[str]:
    found = []
    for each in status["accelerators"]:
        found.append(f"  {each.get('name')} ({each.get('module')} on {each.get('device')})")
        for plan in each.get("plans", ()):
            unit = "step" if each.get("steps", True) else "call"
            said, times = plan_words(plan, unit), f"{plan['replays']} {unit}s"
            found.append(f"    {said}; {plan['state']}, {times}, error {plan['error']}")
            found.append(f"      {plan['signature']}")
        for name, why in each.get("kernels_put_down", {}).items():
            found.append(f"    kernel {name} is not used: {why}")
    return found
