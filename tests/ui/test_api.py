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


def secret():
    return {"secret": True, "last_error": {"stage": "x", "message": "m", "traceback": "/home/user/webui"}}


def test_tracebacks_stay_in_the_log():
    app = fastapi.FastAPI()
    api.register(app, secret)
    assert client(app).get(api.STATUS).json()["last_error"] == {"stage": "x", "message": "m"}


PAGES = {
    "none": None,
    "passwords": {"page": "p1"},
    "a function": lambda user, password: (user, password) == ("page", "p1"),
}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("passwords", [{}, {"api": "p2", "api2": "é:x"}], ids=["no api-auth", "api-auth"])
def test_it_asks_what_the_webui_asks(page, passwords):
    app = fastapi.FastAPI()
    app.auth, app.tokens = PAGES[page], {"good": "page"}
    api.register(app, secret, lambda: passwords)

    def status(cookies=None, **how):
        return client(app).get(api.STATUS, headers={"cookie": cookies or ""}, **how).status_code

    guarded = page != "none" or bool(passwords)
    assert status() == (401 if guarded else 200)
    for auth in (("page", "p2"), ("api", "p1"), ("api", ""), ("other", "p1"), ("", "")):
        assert status(auth=auth) == (401 if guarded else 200)
    assert status(auth=("page", "p1")) == (200 if page != "none" or not guarded else 401)
    assert status(auth=("api", "p2")) == (200 if passwords or not guarded else 401)
    assert status(auth=("api2", "é:x")) == (200 if passwords or not guarded else 401)
    for name in ("access-token", "access-token-unsecure"):
        assert status(f"{name}=good") == (200 if page != "none" or not guarded else 401)
        assert status(f"{name}=bad") == (401 if guarded else 200)
    for header in ("Basic", "Basic !!!", "Basic /w==", "Bearer abc"):
        found = client(app).get(api.STATUS, headers={"authorization": header})
        assert found.status_code == (401 if guarded else 200) and "secret" not in found.text or not guarded


def test_only_one_who_opens_it_is_asked_by_the_browser():
    app = fastapi.FastAPI()
    api.register(app, secret, lambda: {"api": "p2"})
    assert "www-authenticate" not in client(app).get(api.STATUS).headers
    opened = client(app).get(api.STATUS, headers={"accept": "text/html,*/*"})
    assert opened.status_code == 401 and opened.headers["www-authenticate"] == "Basic"
    assert "secret" not in opened.text


def test_it_is_not_among_the_documented_routes():
    app = fastapi.FastAPI()
    api.register(app, dict)
    assert api.STATUS not in app.openapi()["paths"]
