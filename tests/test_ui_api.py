from __future__ import annotations

import json

import pytest
import torch

from sfast_ext.ui import api

fastapi = pytest.importorskip("fastapi")
pytest.importorskip("httpx")


def client(app):
    from fastapi.testclient import TestClient

    return TestClient(app)


def test_the_status_is_answered_as_json():
    app = fastapi.FastAPI()
    calls = []

    def status():
        calls.append(1)
        return {"version": "1", "accelerators": [{"plans": []}], "count": len(calls)}

    api.register(app, status)
    http = client(app)
    assert http.get(api.STATUS).json() == {"version": "1", "accelerators": [{"plans": []}], "count": 1}
    answer = http.get(api.STATUS)
    assert answer.json()["count"] == 2
    assert answer.headers["cache-control"] == "no-store"


def test_it_can_only_be_read():
    app = fastapi.FastAPI()
    api.register(app, dict)
    http = client(app)
    for method in ("post", "put", "delete", "patch"):
        assert getattr(http, method)(api.STATUS).status_code == 405


def test_a_second_registration_takes_the_place_of_the_first():
    app = fastapi.FastAPI()
    app.add_api_route("/other", lambda: {"other": True})
    api.register(app, lambda: {"session": 1})
    api.register(app, lambda: {"session": 2})
    http = client(app)
    assert http.get(api.STATUS).json() == {"session": 2}
    assert http.get("/other").json() == {"other": True}


def test_what_json_does_not_know_becomes_text_or_null():
    odd = {
        "nan": float("nan"),
        "inf": float("inf"),
        3: "key",
        "dtype": torch.float16,
        "device": torch.device("cpu"),
        "tuple": (1, 2),
        "set": {"one"},
        "nested": [{"x": float("-inf")}],
        "none": None,
        "yes": True,
    }
    safe = api.json_safe(odd)
    assert json.loads(json.dumps(safe, allow_nan=False)) == {
        "nan": None,
        "inf": None,
        "3": "key",
        "dtype": "torch.float16",
        "device": "cpu",
        "tuple": [1, 2],
        "set": ["one"],
        "nested": [{"x": None}],
        "none": None,
        "yes": True,
    }
