"""Requests that the description of the API does not allow get an error of the client's and change nothing.

`SFAST_TEST_MALFORMED=2000` plays so many instead of `FEW`.
"""

from __future__ import annotations

import json
import os
import re

import pytest

from sfast_ext.ui import api
from ui.test_api import Started, client, source

fastapi = pytest.importorskip("fastapi")
pytest.importorskip("httpx")
hypothesis = pytest.importorskip("hypothesis")
from hypothesis import strategies as st  # noqa: E402

FEW = 80
TIMES = int(os.environ.get("SFAST_TEST_MALFORMED", FEW))
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
SIDES = st.integers(0, 5000) | st.sampled_from([64, 512, 1024, 4096])
SIZES = st.builds("{}x{}".format, SIDES, SIDES) | st.sampled_from(["512x512", "٥١٢x512", "512x512\n", "512X512 "])


class Server:
    """The routes, with what they were asked to change."""

    def __init__(self):
        self.app, self.dropped, self.started = fastapi.FastAPI(), [], Started()
        api.register(self.app, source(drop=lambda: self.dropped.append(1) or 1, jobs=self.started.jobs()))
        self.http = client(self.app)
        self.described = {
            path: {method.upper(): operation for method, operation in operations.items()}
            for path, operations in self.app.openapi()["paths"].items()
        }
        self.bodies = {
            path: operations["POST"]["requestBody"]["content"]["application/json"]["schema"]
            for path, operations in self.described.items()
            if "requestBody" in operations.get("POST", {})
        }

    def changed(self):
        return self.dropped or self.started


@pytest.fixture(scope="module")
def server():
    return Server()


def valid(value, schema):
    """Whether the description allows a value: what of JSON schema it uses."""
    kind = schema["type"]
    if kind == "object":
        return (
            isinstance(value, dict)
            and value.keys() <= schema["properties"].keys()
            and set(schema["required"]) <= value.keys()
            and all(valid(each, schema["properties"][key]) for key, each in value.items())
        )
    if kind == "array":
        sized = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return sized and all(valid(each, schema["items"]) for each in value)
    if "enum" in schema:
        return type(value) is int and value in schema["enum"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    return isinstance(value, str) and re.search(schema["pattern"], value) is not None


def refused(server, answer):
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text)
    assert not server.changed()
    assert len(answer.content) < 1000
    if answer.status_code == 422:
        assert answer.json()["detail"]


def played(times=1.0):
    return hypothesis.settings(
        max_examples=max(1, int(TIMES * times)),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


# what is nearly right, and anything
OBJECTS = st.fixed_dictionaries(
    {"sizes": st.lists(SIZES | JSON, max_size=5) | JSON},
    optional={
        "images": st.lists(st.integers(-2, 20) | JSON, max_size=5) | JSON,
        "tokens": st.lists(st.sampled_from([75, 150, 77]) | JSON, max_size=5) | JSON,
        "other": JSON,
    },
)


@played(0.6)
@hypothesis.given(value=OBJECTS | JSON, data=st.data())
def test_bodies_that_the_schema_does_not_allow(server, value, data):
    path = data.draw(st.sampled_from(sorted(server.bodies)))
    hypothesis.assume(not valid(value, server.bodies[path]))
    # JSON of Python's, with NaN in it
    answer = server.http.post(path, content=json.dumps(value), headers={"content-type": "application/json"})
    refused(server, answer)


@played(0.2)
@hypothesis.given(body=st.binary(max_size=200), kind=st.sampled_from(["application/json", "text/plain", "", "a/b; c"]))
def test_bodies_that_are_no_json(server, body, kind):
    for path in server.bodies:
        refused(server, server.http.post(path, content=body, headers={"content-type": kind}))


@played(0.2)
@hypothesis.given(data=st.data())
def test_methods_and_paths_that_are_not_there(server, data):
    path = data.draw(st.sampled_from(sorted(server.described)))
    method = data.draw(st.sampled_from([each for each in METHODS if each not in server.described[path]]))
    refused(server, server.http.request(method, path))
    name = data.draw(st.text(st.characters(codec="ascii", categories=["Ll", "Nd"]), min_size=1, max_size=12))
    if f"{api.ROOT}/{name}" not in server.described and name != "help":
        refused(server, server.http.request(data.draw(st.sampled_from(METHODS)), f"{api.ROOT}/{name}"))


def test_what_the_description_allows_is_taken(server):
    """The strategies above would show nothing if all was refused."""
    for path, schema in server.bodies.items():
        body = {"sizes": ["512x768"], "images": [2], "tokens": [75, 225]}
        assert valid(body, schema) and server.http.post(path, json=body).status_code == 202
    assert len(server.started) == len(server.bodies) == 2
    server.started.clear()
