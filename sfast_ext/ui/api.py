"""The state of the extension over HTTP, and what a user may start there, for users whom the WebUI admits."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

from sfast_ext.ui import help_page, permission, requests
from sfast_ext.ui.bug_report import without_paths
from sfast_ext.ui.comparison import Compared

ROOT = "/sfast/v1"
STATUS = f"{ROOT}/status"
NO_STORE = {"Cache-Control": "no-store"}
STATUS_KEPT_S = 0.5
"""Seconds for which the text of a status is given again while the WebUI is at work: many who ask often take little time
from the images."""
REFUSED_BODIES = {413: "The body is too long", 415: "The body is not of the type application/json"}

CHANGING = ("prepare", "measure", "compare", "cancel")
"""What of `Jobs` changes something."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass
class Jobs:
    """What a user may start and cancel. `prepare` and `measure` raise `requests.Refused` if that is not possible."""

    prepare: Callable[[list[requests.Wanted]], dict[str, Any]]
    measure: Callable[[list[requests.Wanted]], dict[str, Any]]
    cancel: Callable[[], bool]
    status: Callable[[], dict[str, Any] | None]
    measurements: Callable[[], list[dict[str, Any]]]
    compare: Callable[[], dict[str, Any]]
    """Makes the last image with and without the extension; raises `requests.Refused` as well."""
    comparison: Callable[[], Compared | None]


@dataclass
class Source:
    """What the routes answer with, from the running session."""

    status: Callable[[], dict[str, Any]]
    report: Callable[[], str]
    """The text for a bug report."""
    drop: Callable[[], int]
    """Drops all plans; returns how many there were."""
    jobs: Jobs
    passwords: Callable[[], Mapping[str, str]] = dict
    """Those of the WebUI's API by user; empty if it requires none."""
    api_is_on: Callable[[], bool] = lambda: True
    """Whether the WebUI's own API answers. If it does not, no route changes anything."""
    subpath: Callable[[], str] = lambda: ""
    """Below which path the WebUI serves its page as well; "" if nowhere."""
    busy: Callable[[], bool] = lambda: True
    """Whether the WebUI is at work."""

    def __post_init__(self) -> None:
        self.app: Any = None
        """The application that the routes were added to; None before that."""
        self.recent = Recent(lambda: public(self.status()), self.busy)
        self.drop = self._changing(self.drop)
        changing = {name: self._changing(getattr(self.jobs, name)) for name in CHANGING}
        self.jobs = replace(self.jobs, **changing)

    def page_may_read(self, request: Any) -> bool:
        """Whether the page may show who asks what the routes answer. The same as the routes ask for.

        Args:
            request: what Gradio gives a function; None if it gives none.
        """
        return permission.page_may_read(self.app, request, self.passwords())

    def _changing(self, action: Callable[_P, _R]) -> Callable[_P, _R]:
        """An action after which the status is told anew, whether a route or the page takes it."""

        def act(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return action(*args, **kwargs)
            finally:
                self.recent.forget()

        return act


def register(app: Any, source: Source) -> None:
    """Add the routes to a FastAPI application. A second call replaces those of the first.

    If the WebUI requires a password, for its page or for its API, so do the routes: they admit a browser that is
    logged in to the page, and HTTP basic authentication with the user and password of either.

    Args:
        app: the application that `on_app_started` passes.
    """
    from fastapi.routing import APIRouter
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

    from sfast_ext.ui import models

    recent, source.app = source.recent, app

    def refusal(request: Request, changes: bool) -> Any:
        """The answer to who may not ask this; None to who may."""
        # the badge's own request must not make the browser ask for a password
        asks = "text/html" in request.headers.get("accept", "")
        if changes and not source.api_is_on():
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        if not permission.allowed(app, request, source.passwords()):
            headers = {"WWW-Authenticate": "Basic"} if asks or changes else {}
            return JSONResponse({"detail": "Unauthorized"}, status_code=401, headers=headers)
        if changes and not permission.same_site(request):
            return JSONResponse({"detail": "Another site must not change anything here"}, status_code=403)
        return None

    def answering(give: Callable[[], Any], changes: bool = False, as_page: bool = False) -> Callable[..., Any]:
        # not async: it runs next to the loop that serves the page
        def answer(request: Request) -> Any:
            refused = refusal(request, changes)
            if refused is not None:
                return refused
            try:
                given = give()
            except requests.Refused as exc:
                return JSONResponse({"detail": json_safe(str(exc))}, status_code=409)
            return HTMLResponse(given) if as_page else JSONResponse(json_safe(given), headers=NO_STORE)

        # FastAPI reads the annotations of a function by the names of its module
        answer.__annotations__ = {"request": Request}
        return answer

    async def current(request: Request) -> Any:
        """The status. In the loop itself if it takes no time: another thread takes as long as the rest."""
        # a function that knows the passwords may take its time
        asks_others = callable(getattr(app, "auth", None))
        refused = await run_in_threadpool(refusal, request, False) if asks_others else refusal(request, False)
        if refused is not None:
            return refused
        text = recent.text() or await run_in_threadpool(recent.made)
        return Response(text, headers=NO_STORE, media_type="application/json")

    current.__annotations__ = {"request": Request}

    def starting(start: Callable[[list[requests.Wanted]], dict[str, Any]]) -> Callable[..., Any]:
        # the body is read here, after the password: who is not admitted learns nothing from a message about it
        async def answer(request: Request) -> Any:
            refused = refusal(request, True)
            if refused is not None:
                return refused
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                return JSONResponse({"detail": "the body must be of the type application/json"}, status_code=415)
            body = b""
            async for part in request.stream():
                body += part
                if len(body) > requests.MAX_BODY:
                    return JSONResponse({"detail": f"at most {requests.MAX_BODY} bytes"}, status_code=413)
            try:
                status = await run_in_threadpool(lambda: start(requests.from_body(body)))
            except ValueError as exc:
                return JSONResponse({"detail": json_safe(str(exc))}, status_code=422)
            except requests.Refused as exc:
                return JSONResponse({"detail": json_safe(str(exc))}, status_code=409)
            return JSONResponse(json_safe(status), status_code=202, headers=NO_STORE)

        answer.__annotations__ = {"request": Request}
        return answer

    def version() -> dict[str, Any]:
        status = source.status()
        return {"version": status["version"], "host": status["host"]}

    jobs = source.jobs
    routes = (
        (
            "status",
            "GET",
            current,
            models.Status,
            f"All that is known, as the badge reads it, while images are made at most {STATUS_KEPT_S} s old.",
        ),
        ("version", "GET", answering(version), models.Version, "The versions of the extension and of the WebUI."),
        (
            "plans",
            "GET",
            answering(lambda: plans(source.status())),
            list[models.Plan],
            "One entry for each size made ready.",
        ),
        (
            "reasons",
            "GET",
            answering(lambda: source.status()["reasons_listed"]),
            list[models.Reason],
            "Why steps were not accelerated, most frequent first.",
        ),
        (
            "report",
            "GET",
            answering(lambda: {"text": source.report()}),
            models.ReportText,
            "The text for a bug report.",
        ),
        (
            "job",
            "GET",
            answering(lambda: {"job": jobs.status()}),
            models.LastJob,
            "The job that runs, or the last one.",
        ),
        (
            "measurements",
            "GET",
            answering(jobs.measurements),
            list[models.Measurement],
            "What was measured, oldest first.",
        ),
        (
            "comparison",
            "GET",
            answering(lambda: {"comparison": found.told if (found := jobs.comparison()) else None}),
            models.LastComparison,
            "The last image with and without the extension, as compare has made it.",
        ),
        (
            "drop",
            "POST",
            answering(lambda: {"dropped": source.drop()}, changes=True),
            models.Dropped,
            "Drop all plans; they are made anew.",
        ),
        (
            "compare",
            "POST",
            answering(jobs.compare, changes=True),
            models.Job,
            "Make the last image again, with and without the extension.",
        ),
        (
            "cancel",
            "POST",
            answering(lambda: {"cancelled": jobs.cancel()}, changes=True),
            models.Cancelled,
            "Cancel the job that runs.",
        ),
    )
    starts = (
        ("prepare", jobs.prepare, "Make sizes ready ahead of time, called as the last image was."),
        ("measure", jobs.measure, "Time the original and the accelerated model in turns at these sizes."),
    )
    unauthorized = {401: {"description": "The WebUI asks for a password"}}
    body = {"requestBody": {"required": True, "content": {"application/json": {"schema": requests.SCHEMA}}}}
    refusals = {409: "Nothing to go by yet, or another job runs", 422: "The body is not valid", **REFUSED_BODIES}
    prefixes = list(dict.fromkeys(("", source.subpath().rstrip("/"))))
    router = APIRouter()

    def add(name: str, answer: Callable[..., Any], method: str, words: str, prefix: str, **more: Any) -> None:
        common: dict[str, Any] = {"response_model": None, "tags": ["Stable Fast"], "include_in_schema": prefix == ""}
        path = f"{prefix}{ROOT}/{name}"
        router.add_api_route(path, answer, methods=[method], summary=words, name=f"sfast_{name}", **common, **more)

    def image(request: Request) -> Any:
        """One of the two images of the last comparison."""
        found = jobs.comparison()
        content = found.files.get(request.path_params["name"]) if found is not None else None
        refused = refusal(request, False)
        if refused is None and content is None:
            refused = JSONResponse({"detail": "Not Found"}, status_code=404)
        return refused or Response(content, headers=NO_STORE, media_type="image/png")

    for prefix in prefixes:
        # what answers; FastAPI's own route, which it describes, takes a third longer
        router.routes.append(Route(f"{prefix}{STATUS}", current, methods=["GET"], include_in_schema=False))
        router.routes.append(
            Route(f"{prefix}{ROOT}/comparison/{{name}}.png", image, methods=["GET"], include_in_schema=False)
        )
        for name, method, answer, model, words in routes:
            described: dict[int, Any] = {200: {"model": model}, **unauthorized}
            add(name, answer, method, words, prefix, responses=described)
        for name, start, words in starts:
            described = {202: {"model": models.Job}, **unauthorized}
            described.update({code: {"description": said} for code, said in refusals.items()})
            more = {"responses": described, "status_code": 202, "openapi_extra": body}
            add(name, starting(start), "POST", words, prefix, **more)
        router.add_api_route(
            f"{prefix}{ROOT}/help", answering(help_page.html, as_page=True), methods=["GET"], include_in_schema=False
        )
    # after a reload of the scripts the old routes would answer for the session before; in front, as a page that is
    # mounted below a path takes all that comes after it
    kept = [route for route in app.router.routes if f"{ROOT}/" not in getattr(route, "path", "")]
    app.router.routes[:] = [*router.routes, *kept]
    app.openapi_schema = None


class Recent:
    """The text of a status, made again after `STATUS_KEPT_S` seconds, or once something changed or the work is done."""

    def __init__(self, give: Callable[[], dict[str, Any]], busy: Callable[[], bool]) -> None:
        self._give, self._busy = give, busy
        self._kept: tuple[float, bytes] | None = None
        self._changes = 0

    def text(self) -> bytes | None:
        """What was made a moment ago, or None."""
        kept = self._kept
        return kept[1] if kept is not None and time.monotonic() - kept[0] < STATUS_KEPT_S and self._busy() else None

    def made(self) -> bytes:
        """The text as it is now."""
        began, changes = time.monotonic(), self._changes
        text = json.dumps(json_safe(self._give()), ensure_ascii=False, separators=(",", ":")).encode()
        if changes == self._changes:
            self._kept = began, text
        return text

    def forget(self) -> None:
        """The next text is made anew."""
        self._changes += 1
        self._kept = None


def plans(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The plans of all networks, each with the name of its network."""
    return [{"network": each.get("name"), **plan} for each in status["accelerators"] for plan in each.get("plans", ())]


def public(status: dict[str, Any]) -> dict[str, Any]:
    """The status without tracebacks, which contain the names of the user's folders. The log has them."""
    error = status.get("last_error")
    if not isinstance(error, Mapping):
        return status
    return {**status, "last_error": {key: value for key, value in error.items() if key != "traceback"}}


def json_safe(value: Any) -> Any:
    """The value in types that JSON has, without folders of the user. Numbers that are not finite become None, other
    objects their text."""
    if isinstance(value, str):
        return without_paths(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_safe(v) for v in value]
    return without_paths(str(value))
