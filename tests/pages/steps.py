"""The steps of a user on a page of Gradio without a browser: what is written in its fields, and what its buttons do."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


class Page:
    """A page that is open.

    Args:
        url: of its server.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.html = self._get("/").decode()
        self.config = json.loads(self._get("/config"))
        self.components = {each["id"]: each["props"] for each in self.config["components"]}
        self._ids = {props["elem_id"]: number for number, props in self.components.items() if props.get("elem_id")}
        self.updates: dict[str, Any] = {}
        """By the elements' ids, what the last click on a button answered to each."""

    def named(self, elem_id: str) -> dict[str, Any]:
        """The properties of an element."""
        props: dict[str, Any] = self.components[self._ids[elem_id]]
        return props

    def fill(self, elem_id: str, value: Any) -> None:
        """Write into a field."""
        self.named(elem_id)["value"] = value

    def shown(self, elem_id: str) -> Any:
        """What a field or a text holds now."""
        return self.named(elem_id)["value"]

    def click(self, elem_id: str) -> list[str]:
        """Click a button. Returns the JavaScript that the page runs then."""
        number = self._ids[elem_id]
        scripts: list[str] = []
        last = [at for at, each in enumerate(self.config["dependencies"]) if number in self._targets(each)]
        assert last, f"{elem_id} does nothing"
        while last:
            for at in last:
                each = self.config["dependencies"][at]
                scripts += [each["js"]] if each["js"] else []
                if each["backend_fn"]:
                    self._run(at, each)
            last = [at for at, each in enumerate(self.config["dependencies"]) if each["trigger_after"] in last]
        return scripts

    @staticmethod
    def _targets(dependency: dict[str, Any]) -> list[int]:
        return [] if dependency["trigger"] != "click" else dependency["targets"]

    def _run(self, at: int, dependency: dict[str, Any]) -> None:
        data = [self.components[number].get("value") for number in dependency["inputs"]]
        asked = {"fn_index": at, "data": data, "session_hash": "one"}
        answers = json.loads(self._get("/run/predict", asked))["data"]
        for number, answer in zip(dependency["outputs"], answers):
            update = answer if isinstance(answer, dict) and answer.get("__type__") == "update" else {"value": answer}
            self.components[number].update(update)

    def api(self, path: str, body: Any = None) -> Any:
        """What a route of ours answers."""
        return json.loads(self._get(f"/sfast/v1/{path}", body))

    def file(self, path: str) -> bytes:
        """The same, as it is."""
        return self._get(f"/sfast/v1/{path}")

    def _get(self, path: str, body: Any = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())
