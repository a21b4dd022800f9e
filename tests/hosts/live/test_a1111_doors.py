"""Who may change anything in the real AUTOMATIC1111, under all flags that open or close its own API."""

from __future__ import annotations

import base64
import itertools
import json
import shlex
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from .a1111 import FLAGS, HOST, MARKS, STARTED, WITHOUT_NETWORK, python
from .webui import WebUI

pytestmark = MARKS
GIVEN = {"--api": "", "--api-auth": "api:one,second:two", "--gradio-auth": "page:three", "--listen": ""}
COMBINATIONS = [given for n in range(len(GIVEN) + 1) for given in itertools.combinations(GIVEN, n)]
SIZES = {"sizes": ["192x128"]}
CHANGING: dict[str, Any] = {"drop": None, "cancel": None, "prepare": SIZES, "measure": SIZES}
# 409: there is no picture to go by
ADMITTED = {200, 409}
UP = "/openapi.json"
"""What the host answers whoever asks, with any of these flags."""


def asked(webui: WebUI, path: str, body: Any = None, user: str = "", method: str = "POST", **headers: str) -> int:
    """The status code of an answer."""
    data = None if method == "GET" else json.dumps(body).encode()
    request = urllib.request.Request(webui.url + path, data, method=method)
    request.add_header("Content-Type", "application/json")
    for name, value in headers.items():
        request.add_header(name, value)
    if user:
        request.add_header("Authorization", f"Basic {base64.b64encode(user.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def changed(webui: WebUI, **how: Any) -> set[int]:
    """The status codes of all that changes anything."""
    return {asked(webui, f"/sfast/v1/{name}", body, **how) for name, body in CHANGING.items()}


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
