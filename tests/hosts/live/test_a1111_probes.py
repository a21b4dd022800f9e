"""A WebUI that an update has changed: a name that is relied on is gone, or raises; see `a1111.py` for the variables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .a1111 import MARKS, PLAIN, TOLERANCE, apart, make_data, make_models, play, start
from .webui import add_extension

pytestmark = MARKS

# the folder's name puts its script before those of other extensions
FIRST = "a-changed-webui"
CHANGES = {
    "on_cfg_denoiser": "del script_callbacks.on_cfg_denoiser",
    "changed by an update": """
def raises(callback):
    script_callbacks.add_callback(script_callbacks.callback_map["callbacks_cfg_denoiser"], callback)
    raise RuntimeError("changed by an update")


script_callbacks.on_cfg_denoiser = raises
""",
}
LEFT = """
import json
from pathlib import Path

from modules import script_callbacks, shared


def tell(_demo, app):
    ours = [c.name for each in script_callbacks.callback_map.values() for c in each if "stable-fast" in c.name]
    settings = [key for key in (*shared.opts.data_labels, *shared.opts.data) if key.startswith("sfast_")]
    app.add_api_route("/left", lambda: {"callbacks": ours, "settings": settings}, methods=["GET"])


script_callbacks.on_app_started(tell)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


@pytest.fixture(scope="module")
def stock(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    data = make_data(tmp_path_factory.mktemp("stock"), models)
    with start(data, "stock", {"disabled_extensions": ["stable-fast"]}) as webui:
        yield play(webui, "txt2img", PLAIN)


@pytest.mark.parametrize("words", CHANGES)
def test_nothing_stays_and_the_image_is_the_webui_s_own(
    words: str, stock: list[str], models: Path, tmp_path: Path
) -> None:
    data = make_data(tmp_path, models)
    changes = f"from modules import script_callbacks\n{CHANGES[words]}\n"
    add_extension(data, FIRST, changes)
    add_extension(data, "z-what-is-left", LEFT)
    with start(data, "changed", {"sfast_allow_cpu": True}) as webui:
        images = play(webui, "txt2img", PLAIN)
        assert apart(images, stock) < TOLERANCE / 1000
        status: dict[str, Any] = webui.get("/sfast/v1/status")
        assert status["unserved"].startswith("this WebUI lacks what Stable Fast relies on: ")
        assert words in status["unserved"] and words in status["badge"]["detail"]
        assert status["accelerators"] == [] and not any(status["counters"].values())
        left = webui.get("/left")
        assert all("app_started" in name for name in left["callbacks"]) and len(left["callbacks"]) <= 1, left
        assert left["settings"] in ([], ["sfast_allow_cpu"])
    lines = [line for line in webui.log().splitlines() if "does nothing" in line]
    assert len(lines) == 1 and words in lines[0]
