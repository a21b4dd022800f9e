"""What the tests of who may change anything share: requests by the name of a user or without one."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from typing import Any

from .webui import WebUI

SIZES = {"sizes": ["192x128"]}
CHANGING: dict[str, Any] = {"drop": None, "cancel": None, "prepare": SIZES, "measure": SIZES}
# 409: there is no image to go by
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
