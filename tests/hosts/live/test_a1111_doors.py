"""Who may change anything in the real AUTOMATIC1111, under all flags that open or close its own API."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path

import pytest

from .a1111 import FLAGS, HOST, MARKS, STARTED, WITHOUT_NETWORK, python
from .doors import ADMITTED, UP, asked, changed
from .webui import WebUI

pytestmark = MARKS
GIVEN = {"--api": "", "--api-auth": "api:one,second:two", "--gradio-auth": "page:three", "--listen": ""}
COMBINATIONS = [given for n in range(len(GIVEN) + 1) for given in itertools.combinations(GIVEN, n)]


@pytest.mark.parametrize("given", COMBINATIONS, ids=lambda given: " ".join(given) or "no flag")
def test_changing_routes_are_as_closed_as_the_webui_s_own(data: Path, given: tuple[str, ...]) -> None:
    common = WITHOUT_NETWORK.replace("--api", "")
    if "--listen" in given:
        common = common.replace("--server-name 127.0.0.1", "")
    flags = [each for name in given for each in (name, GIVEN[name]) if each]
    name = "-".join(given) or "none"
    config = data / f"doors{name}.json"
    config.write_text(json.dumps({"sd_model_checkpoint": "tiny.safetensors", "sfast_allow_cpu": True}), "utf-8")
    command = [python(), "launch.py", *shlex.split(FLAGS), *shlex.split(common), *flags]
    command += ["--data-dir", str(data), "--ui-settings-file", str(config)]
    with WebUI(command, Path(HOST or ""), data / f"doors{name}.log", ready=UP, said=STARTED) as webui:
        api, api_auth, page_auth = ("--api" in given, "--api-auth" in given, "--gradio-auth" in given)
        guarded = api_auth or page_auth
        host = asked(webui, "/sdapi/v1/interrupt")
        assert host == (404 if not api else 401 if api_auth else 200)
        assert asked(webui, "/sfast/v1/status", method="GET") == (401 if guarded else 200)
        if not api:
            assert changed(webui) == changed(webui, user="api:one") == changed(webui, user="page:three") == {404}
            return
        refused = {401} if guarded else ADMITTED
        assert changed(webui) == changed(webui, user="api:three") == changed(webui, user="nobody:") == refused
        if api_auth:
            assert changed(webui, user="api:one") == changed(webui, user="second:two") == ADMITTED
        if page_auth:
            assert changed(webui, user="page:three") == ADMITTED
        assert changed(webui, Origin="http://evil.example") == ({401} if guarded else {403})
