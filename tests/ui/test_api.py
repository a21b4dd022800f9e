from __future__ import annotations

import contextlib
import inspect
import json
from types import SimpleNamespace

import pytest
import torch

from sfast_ext.ui import api, requests
from sfast_ext.ui.comparison import Compared

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


JOB = {
    "kind": "prepare", "state": "waiting", "done": 0, "total": 1, "label": "512x512, 1 image", "seconds": 0.0,
    "seconds_left": None, "message": None, "rows": [],
}  # fmt: skip


SIDE = {"width": 64, "height": 48, "seconds": 0.5, "steps": {"accelerated": 4}, "reason": None}
COMPARED = Compared(
    {
        "accelerated": SIDE, "original": SIDE, "times": 2.0, "mean_difference": 0.1, "largest_difference": 1,
        "same_request": True,
    },
    {"accelerated": b"one", "original": b"another"},
)  # fmt: skip


class Started(list):
    """What was asked of the jobs."""

    def jobs(self, refuses=None):
        def start(kind):
            def started(wanted):
                if refuses is not None:
                    raise requests.Refused(refuses)
                self.append((kind, [each.label for each in wanted]))
                return {**JOB, "kind": kind}

            return started

        cancel = lambda: self.append("cancel") or True
        kept = lambda: [{"when": "now", "rows": []}]
        compare = lambda: start("compare")([])
        return api.Jobs(start("prepare"), start("measure"), cancel, lambda: JOB, kept, compare, lambda: COMPARED)


def source(status=state, report=lambda: "a report", drop=lambda: 2, jobs=None, **more):
    return api.Source(status, report, drop, jobs or Started().jobs(), **more)


CHANGING = ("drop", "cancel", "prepare", "measure", "compare")


def change(app, name, **how):
    body = {"json": {"sizes": ["512x512"]}} if name in ("prepare", "measure") else {}
    return client(app).post(f"/sfast/v1/{name}", **body, **how)


def test_the_status_is_answered_as_json(monkeypatch):
    monkeypatch.setattr(api, "STATUS_KEPT_S", 0)
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
    assert answer.headers["content-type"] == "application/json"


def test_a_status_is_given_again_for_a_moment_or_until_something_changes(monkeypatch):
    app, now, calls = fastapi.FastAPI(), [1000.0], []
    monkeypatch.setattr(api, "time", SimpleNamespace(monotonic=lambda: now[0]))
    given = source(lambda: state(count=len(calls), asked=calls.append(1)))
    api.register(app, given)
    count = lambda: client(app).get(api.STATUS).json()["count"]
    assert [count(), count()] == [0, 0]
    now[0] += 0.9 * api.STATUS_KEPT_S
    assert count() == 0
    now[0] += 0.2 * api.STATUS_KEPT_S
    assert [count(), count()] == [1, 1]
    for made, name in enumerate(CHANGING, 2):
        assert change(app, name).status_code in (200, 202)
        assert [count(), count()] == [made, made], name
    # what a button of the page does, also if it fails
    for action in (lambda: "done", lambda: 1 // 0):
        with contextlib.suppress(ZeroDivisionError):
            assert given._changing(action)() == "done"
        made += 1
        assert [count(), count()] == [made, made]
    given.drop()
    assert count() == made + 1
    # once the image is made, the next one who asks is told of it
    given.recent._busy = lambda: False
    assert [count(), count()] == [made + 2, made + 3]
    # what another session answers is not this one's
    api.register(app, source(lambda: state(count="another")))
    assert count() == "another"


def test_a_status_made_while_something_changes_is_not_given_again():
    dropped = []

    def status():
        if len(dropped) == 1:
            dropped.append(recent.forget())
            return {"plans": 2}
        return {"plans": 0 if dropped else 2}

    recent = api.Recent(status, lambda: True)
    assert json.loads(recent.made()) == {"plans": 2} and recent.text()
    dropped.append(recent.forget())
    assert json.loads(recent.made()) == {"plans": 2} and recent.text() is None
    assert json.loads(recent.made()) == {"plans": 0} and recent.text()


def test_each_route_answers_with_its_part():
    app = fastapi.FastAPI()
    api.register(app, source())
    http = client(app)
    assert http.get("/sfast/v1/version").json() == {"version": "1", "host": {"name": "a host", "version": "2"}}
    assert http.get("/sfast/v1/plans").json() == [{"network": "unet", "label": "512x512"}]
    assert http.get("/sfast/v1/reasons").json()[0]["code"] == "hypernetwork"
    assert http.get("/sfast/v1/report").json() == {"text": "a report"}
    assert http.post("/sfast/v1/drop").json() == {"dropped": 2}
    assert http.post("/sfast/v1/cancel").json() == {"cancelled": True}
    assert http.get("/sfast/v1/job").json() == {"job": JOB}
    assert http.get("/sfast/v1/measurements").json() == [{"when": "now", "rows": []}]
    assert 'id="hypernetwork"' in http.get("/sfast/v1/help").text


def test_only_four_routes_change_anything():
    app = fastapi.FastAPI()
    dropped, started = [], Started()
    api.register(app, source(drop=lambda: dropped.append(1) or 0, jobs=started.jobs()))
    http = client(app)
    for name in ("status", "version", "plans", "reasons", "report", "help", "job", "measurements"):
        for method in ("post", "put", "delete", "patch"):
            assert getattr(http, method)(f"/sfast/v1/{name}").status_code == 405
    for name in CHANGING:
        for method in ("get", "put", "delete", "patch"):
            assert getattr(http, method)(f"/sfast/v1/{name}").status_code == 405
    assert not dropped and not started


@pytest.mark.parametrize("kind", ["prepare", "measure"])
def test_a_job_is_started_with_what_was_asked_for(kind):
    app = fastapi.FastAPI()
    started = Started()
    api.register(app, source(jobs=started.jobs()))
    body = {"sizes": ["512x512", "768x512", "512x512"], "images": [1, 4]}
    answer = client(app).post(f"/sfast/v1/{kind}", json=body)
    assert answer.status_code == 202 and answer.json()["kind"] == kind
    labels = ["512x512, 1 image", "512x512, 4 images", "768x512, 1 image", "768x512, 4 images"]
    assert started == [(kind, labels)]


def test_a_job_that_cannot_start_says_why():
    app = fastapi.FastAPI()
    api.register(app, source(jobs=Started().jobs(refuses="make one image first, not in /home/someone/webui/x.pt")))
    answer = change(app, "prepare")
    assert answer.status_code == 409 and answer.json()["detail"].startswith("make one image first")
    assert "someone" not in answer.text


@pytest.mark.parametrize(
    ("body", "kind", "code", "said"),
    [
        (b"{}", "application/json", 422, "sizes is missing"),
        (b"[]", "application/json", 422, "must be an object"),
        (b"\xff{", "application/json", 422, "must be JSON"),
        (b"[" * 5000, "application/json; charset=utf-8", 422, "must be JSON"),
        (b'{"sizes": ["512x512"], "image": [1]}', "application/json", 422, "unknown field 'image'"),
        (b'{"sizes": ["512"]}', "application/json", 422, "one is '512'"),
        (b'{"sizes": ["512x515"]}', "application/json", 422, "divisible by 8; one is 512x515"),
        (b'{"sizes": ["512x9999999999"]}', "application/json", 422, "width x height"),
        (b'{"sizes": ["512x512"], "images": [true]}', "application/json", 422, "one is True"),
        (b'{"sizes": ["512x512"], "images": [1.0]}', "application/json", 422, "one is 1.0"),
        (b'{"sizes": ["512x512"], "images": [17]}', "application/json", 422, "from 1 to 16; one is 17"),
        (b'{"sizes": ["512x512"], "images": []}', "application/json", 422, "at least one number"),
        (b'{"sizes": ["512x512"], "pictures": [1], "images": [1]}', "application/json", 422, "leave pictures out"),
        (b'{"sizes": ["512x512"], "tokens": [77]}', "application/json", 422, "among 75, 150, 225; one is 77"),
        (json.dumps({"sizes": ["512x512"] * 33}).encode(), "application/json", 422, "at most 32"),
        (b'{"sizes": ["512x512"]}', "text/plain", 415, "application/json"),
        (b'{"sizes": ["512x512"]' + b" " * 70000 + b"}", "application/json", 413, "at most 65536 bytes"),
    ],
)
def test_a_body_that_is_not_valid_is_refused_by_name(body, kind, code, said):
    app = fastapi.FastAPI()
    started = Started()
    api.register(app, source(jobs=started.jobs()))
    for name in ("prepare", "measure"):
        answer = client(app).post(f"/sfast/v1/{name}", content=body, headers={"content-type": kind})
        assert (answer.status_code, started) == (code, []) and said in answer.json()["detail"]


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


@pytest.mark.parametrize("name", CHANGING)
def test_nothing_is_changed_if_the_api_of_the_webui_is_closed(name):
    app = fastapi.FastAPI()
    changed, started = [], Started()
    api.register(app, source(drop=lambda: changed.append(1), jobs=started.jobs(), api_is_on=lambda: False))
    assert change(app, name).status_code == 404 and not changed and not started
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
    changed, started = [], Started()
    api.register(app, source(drop=lambda: changed.append(1) or 1, jobs=started.jobs()))
    for name in CHANGING:
        assert (change(app, name, headers=headers).status_code < 300) == may
    assert bool(changed) == may and len(started) == (4 if may else 0)


def test_a_comparison_is_started_and_answered_with_its_images():
    app = fastapi.FastAPI()
    started = Started()
    api.register(app, source(jobs=started.jobs()))
    answer = client(app).post("/sfast/v1/compare")
    assert answer.json()["kind"] == "compare" and started == [("compare", [])]
    assert client(app).get("/sfast/v1/comparison").json() == {"comparison": COMPARED.told}
    for name, content in COMPARED.files.items():
        image = client(app).get(f"/sfast/v1/comparison/{name}.png")
        assert image.content == content and image.headers["content-type"] == "image/png"
    assert client(app).get("/sfast/v1/comparison/other.png").status_code == 404


def test_a_comparison_that_cannot_start_says_why():
    app = fastapi.FastAPI()
    api.register(app, source(jobs=Started().jobs(refuses="make one image first")))
    answer = client(app).post("/sfast/v1/compare")
    assert answer.status_code == 409 and answer.json() == {"detail": "make one image first"}


def test_images_are_for_those_who_may_ask():
    app = fastapi.FastAPI()
    api.register(app, source(passwords=lambda: {"user": "secret"}))
    for name in ("comparison", "comparison/original.png", "comparison/other.png"):
        assert client(app).get(f"/sfast/v1/{name}").status_code == 401
        answer = client(app).get(f"/sfast/v1/{name}", auth=("user", "secret"))
        assert answer.status_code == (404 if "other" in name else 200)


def test_the_routes_are_described():
    app = fastapi.FastAPI()
    api.register(app, source())
    described = app.openapi()
    for name in ("status", "version", "plans", "reasons", "report", "drop", "cancel", "job", "measurements"):
        (operation,) = described["paths"][f"/sfast/v1/{name}"].values()
        assert operation["summary"] and operation["responses"]["200"]["content"]
    for name in ("prepare", "measure"):
        operation = described["paths"][f"/sfast/v1/{name}"]["post"]
        assert operation["summary"] and operation["responses"]["202"]["content"]
        assert operation["requestBody"]["content"]["application/json"]["schema"] == requests.SCHEMA
    models = described["components"]["schemas"]
    assert {"Status", "Plan", "Reason", "Dropped"} <= set(models)
    for model in ("Status", "Plan", "Reason", "Job", "Row", "Measurement"):
        assert all(field.get("description") for field in models[model]["properties"].values())


def test_the_descriptions_name_what_is_answered():
    from sfast_ext.plans.plan import Plan
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
    changed, started = [], Started()
    drop = lambda: changed.append(1) or 1
    api.register(app, source(secret, passwords=lambda: passwords, drop=drop, jobs=started.jobs()))

    def status(cookies=None, **how):
        return client(app).get(api.STATUS, headers={"cookie": cookies or ""}, **how).status_code

    guarded = page != "none" or bool(passwords)
    for name in CHANGING:
        for how in ({}, {"auth": ("other", "p1")}):
            answer = change(app, name, **how)
            assert (answer.status_code == 401) == guarded and (answer.status_code < 300) != guarded
        if guarded and name in ("prepare", "measure"):
            # nor does a body that is not valid get another answer
            assert client(app).post(f"/sfast/v1/{name}", content=b"{").status_code == 401
    assert bool(changed) != guarded and bool(started) != guarded
    for name in ("version", "plans", "reasons", "report", "help", "job", "measurements"):
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


class Queued:
    """What Gradio's queue gives in place of a mapping."""

    def __init__(self, **values):
        self.__dict__.update(values)

    def __iter__(self):
        yield from vars(self).items()


@pytest.mark.parametrize("passwords", [{}, {"api": "p2", "api2": "é:x"}], ids=["no api-auth", "api-auth"])
@pytest.mark.parametrize(
    "auth", [None, ("api", "p2"), ("api2", "é:x"), ("api", "p1"), ("api", ""), ("page", "p1"), ("", ""), ("API", "p2")]
)
@pytest.mark.parametrize("kind", ["headers", "queue"])
def test_the_page_shows_what_the_route_answers_to_the_same_browser(passwords, auth, kind):
    app = fastapi.FastAPI()
    app.auth = None
    given = source(passwords=lambda: passwords)
    api.register(app, given)
    answer = client(app).get("/sfast/v1/report", **({"auth": auth} if auth else {}))
    headers = {key: value for key, value in answer.request.headers.items() if key == "authorization"}
    request = SimpleNamespace(headers=answer.request.headers if kind == "headers" else Queued(**headers))
    assert given.page_may_read(request) == (answer.status_code == 200)
    assert given.page_may_read(None) == (not passwords)
    assert given.page_may_read(SimpleNamespace()) == (not passwords)


@pytest.mark.parametrize("page", ["passwords", "a function"])
def test_who_is_logged_in_to_the_page_may_read(page):
    app = fastapi.FastAPI()
    app.auth, app.tokens = PAGES[page], {"good": "page"}
    given = source(passwords=lambda: {"api": "p2"})
    # nobody is logged in before there is a page
    assert not given.page_may_read(None)
    api.register(app, given)
    assert given.page_may_read(None)
    assert client(app).get("/sfast/v1/report", headers={"cookie": "access-token=good"}).status_code == 200


@pytest.mark.parametrize("header", ["Basic", "Basic !!!", "Basic /w==", "Bearer abc", "Basic YXBpOnAy\n", ""])
def test_a_header_that_is_none_admits_nobody(header):
    given = source(passwords=lambda: {"api": "p2"})
    given.app = SimpleNamespace(auth=None)
    assert not given.page_may_read(SimpleNamespace(headers={"authorization": header}))
    assert given.page_may_read(SimpleNamespace(headers={"Authorization": "basic YXBpOnAy"}))


def test_only_one_who_opens_it_is_asked_by_the_browser():
    app = fastapi.FastAPI()
    api.register(app, source(secret, passwords=lambda: {"api": "p2"}))
    assert "www-authenticate" not in client(app).get(api.STATUS).headers
    opened = client(app).get(api.STATUS, headers={"accept": "text/html,*/*"})
    assert opened.status_code == 401 and opened.headers["www-authenticate"] == "Basic"
    assert "secret" not in opened.text
