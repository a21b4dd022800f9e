from __future__ import annotations

import inspect
import json

import pytest
import torch

from sfast_ext.ui import api

fastapi = pytest.importorskip("fastapi")
pytest.importorskip("httpx")


def client(app):
    from fastapi.testclient import TestClient

    return TestClient(app)


def state(**more):
    return {
        "version": "1",
        "host": {"name": "a host", "version": "2"},
        "accelerators": [{"name": "unet", "plans": [{"label": "512x512"}]}],
        "reasons_listed": [{"reason": "a hypernetwork is active", "code": "hypernetwork", "calls": 3}],
        **more,
    }


def source(status=state, report=lambda: "a report", drop=lambda: 2, **more):
    return api.Source(status, report, drop, **more)


def test_the_status_is_answered_as_json():
    app = fastapi.FastAPI()
    calls = []

    def status():
        calls.append(1)
        return state(count=len(calls))

    api.register(app, source(status))
    http = client(app)
    assert http.get(api.STATUS).json() == state(count=1)
    answer = http.get(api.STATUS)
    assert answer.json()["count"] == 2
    assert answer.headers["cache-control"] == "no-store"


def test_each_route_answers_with_its_part():
    app = fastapi.FastAPI()
    api.register(app, source())
    http = client(app)
    assert http.get("/sfast/v1/version").json() == {"version": "1", "host": {"name": "a host", "version": "2"}}
    assert http.get("/sfast/v1/plans").json() == [{"network": "unet", "label": "512x512"}]
    assert http.get("/sfast/v1/reasons").json()[0]["code"] == "hypernetwork"
    assert http.get("/sfast/v1/report").json() == {"text": "a report"}
    assert http.post("/sfast/v1/drop").json() == {"dropped": 2}
    assert 'id="hypernetwork"' in http.get("/sfast/v1/help").text


def test_only_drop_changes_anything():
    app = fastapi.FastAPI()
    dropped = []
    api.register(app, source(drop=lambda: dropped.append(1) or 0))
    http = client(app)
    for name in ("status", "version", "plans", "reasons", "report", "help"):
        for method in ("post", "put", "delete", "patch"):
            assert getattr(http, method)(f"/sfast/v1/{name}").status_code == 405
    for method in ("get", "put", "delete", "patch"):
        assert getattr(http, method)("/sfast/v1/drop").status_code == 405
    assert not dropped


def test_a_second_registration_takes_the_place_of_the_first():
    app = fastapi.FastAPI()
    app.add_api_route("/other", lambda: {"other": True})
    api.register(app, source(lambda: state(session=1)))
    before = len(app.router.routes)
    api.register(app, source(lambda: state(session=2)))
    http = client(app)
    assert http.get(api.STATUS).json()["session"] == 2 and len(app.router.routes) == before
    assert http.get("/other").json() == {"other": True}


def test_a_page_that_is_mounted_below_a_path_does_not_hide_the_routes():
    app = fastapi.FastAPI()
    app.mount("/sub", fastapi.FastAPI())
    api.register(app, source(subpath=lambda: "/sub"))
    http = client(app)
    assert http.get("/sub/sfast/v1/status").json() == http.get("/sfast/v1/status").json() == state()


def test_nothing_is_changed_where_the_api_of_the_webui_is_closed():
    app = fastapi.FastAPI()
    dropped = []
    api.register(app, source(drop=lambda: dropped.append(1), api_is_on=lambda: False))
    assert client(app).post("/sfast/v1/drop").status_code == 404 and not dropped
    assert client(app).get(api.STATUS).status_code == 200


@pytest.mark.parametrize(
    ("headers", "may"),
    [
        ({}, True),
        ({"origin": "http://testserver"}, True),
        ({"origin": "http://evil.example"}, False),
        ({"origin": "null"}, False),
        ({"origin": "https://my.proxy", "x-forwarded-host": "my.proxy"}, True),
        ({"origin": "http://inside", "sec-fetch-site": "same-origin"}, True),
        ({"origin": "http://testserver", "sec-fetch-site": "cross-site"}, False),
    ],
)
def test_a_page_of_another_site_changes_nothing(headers, may):
    app = fastapi.FastAPI()
    dropped = []
    api.register(app, source(drop=lambda: dropped.append(1) or 1))
    assert client(app).post("/sfast/v1/drop", headers=headers).status_code == (200 if may else 403)
    assert bool(dropped) == may


def test_the_routes_are_described():
    app = fastapi.FastAPI()
    api.register(app, source())
    described = app.openapi()
    for name in ("status", "version", "plans", "reasons", "report", "drop"):
        (operation,) = described["paths"][f"/sfast/v1/{name}"].values()
        assert operation["summary"] and operation["responses"]["200"]["content"]
    models = described["components"]["schemas"]
    assert {"Status", "Plan", "Reason", "Dropped"} <= set(models)
    for model in ("Status", "Plan", "Reason"):
        assert all(field.get("description") for field in models[model]["properties"].values())


def test_the_descriptions_name_what_is_answered():
    from sfast_ext.runtime.plan import Plan
    from sfast_ext.ui import models

    told = set(getattr(models.Plan, "model_fields", None) or models.Plan.__fields__)
    source_code = inspect.getsource(Plan.status)
    assert all(f'"{name}"' in source_code for name in told - {"network", "last_pass"})


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
    return state() | {"secret": True, "last_error": {"stage": "x", "message": "m", "traceback": "/home/user/webui"}}


def test_tracebacks_stay_in_the_log():
    app = fastapi.FastAPI()
    api.register(app, source(secret))
    assert client(app).get(api.STATUS).json()["last_error"] == {"stage": "x", "message": "m"}


def test_folders_stay_in_the_log():
    app = fastapi.FastAPI()
    message = r"FileNotFoundError: '/srv/someone/webui/models/x.pt' and C:\Users\someone\webui\a.py"
    api.register(app, source(lambda: state(events=[{"message": message}])))
    (event,) = client(app).get(api.STATUS).json()["events"]
    assert "someone" not in event["message"] and "models/x.pt" in event["message"] and "a.py" in event["message"]


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
    dropped = []
    api.register(app, source(secret, passwords=lambda: passwords, drop=lambda: dropped.append(1) or 1))

    def status(cookies=None, **how):
        return client(app).get(api.STATUS, headers={"cookie": cookies or ""}, **how).status_code

    guarded = page != "none" or bool(passwords)
    assert client(app).post("/sfast/v1/drop").status_code == (401 if guarded else 200)
    assert client(app).post("/sfast/v1/drop", auth=("other", "p1")).status_code == (401 if guarded else 200)
    assert bool(dropped) != guarded
    for name in ("version", "plans", "reasons", "report", "help"):
        assert client(app).get(f"/sfast/v1/{name}").status_code == (401 if guarded else 200)
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
    api.register(app, source(secret, passwords=lambda: {"api": "p2"}))
    assert "www-authenticate" not in client(app).get(api.STATUS).headers
    opened = client(app).get(api.STATUS, headers={"accept": "text/html,*/*"})
    assert opened.status_code == 401 and opened.headers["www-authenticate"] == "Basic"
    assert "secret" not in opened.text
