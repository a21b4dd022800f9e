"""The state of the extension over HTTP, for users whom the WebUI admits, and one route that changes something."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from secrets import compare_digest
from typing import Any
from urllib.parse import urlsplit

from sfast_ext.ui import help_page
from sfast_ext.ui.bug_report import without_paths

ROOT = "/sfast/v1"
STATUS = f"{ROOT}/status"
NO_STORE = {"Cache-Control": "no-store"}


@dataclass
class Source:
    """What the routes answer with, from the running session."""

    status: Callable[[], dict[str, Any]]
    report: Callable[[], str]
    """The text for a bug report."""
    drop: Callable[[], int]
    """Drops all plans; returns how many there were."""
    passwords: Callable[[], Mapping[str, str]] = dict
    """Those of the WebUI's API by user; empty where it requires none."""
    api_is_on: Callable[[], bool] = lambda: True
    """Whether the WebUI's own API answers. Where it does not, no route changes anything."""
    subpath: Callable[[], str] = lambda: ""
    """Below which path the WebUI serves its page as well; "" where nowhere."""


def register(app: Any, source: Source) -> None:
    """Add the routes to a FastAPI application. A second call replaces those of the first.

    Where the WebUI requires a password, for its page or for its API, so do the routes: they admit a browser that is
    logged in to the page, and HTTP basic authentication with the user and password of either.

    Args:
        app: the application that `on_app_started` passes.
    """
    from fastapi.routing import APIRouter
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse

    from sfast_ext.ui import models

    def answering(give: Callable[[], Any], changes: bool = False, as_page: bool = False) -> Callable[..., Any]:
        # not async: it runs beside the loop that serves the page
        def answer(request: Request) -> Any:
            # the badge's own request must not make the browser ask for a password
            asks = "text/html" in request.headers.get("accept", "")
            if changes and not source.api_is_on():
                return JSONResponse({"detail": "Not Found"}, status_code=404)
            if not allowed(app, request, source.passwords()):
                headers = {"WWW-Authenticate": "Basic"} if asks or changes else {}
                return JSONResponse({"detail": "Unauthorized"}, status_code=401, headers=headers)
            if changes and not same_site(request):
                return JSONResponse({"detail": "Another site must not change anything here"}, status_code=403)
            if as_page:
                return HTMLResponse(give())
            return JSONResponse(json_safe(give()), headers=NO_STORE)

        # FastAPI reads the annotations of a function by the names of its module
        answer.__annotations__ = {"request": Request}
        return answer

    def version() -> dict[str, Any]:
        status = source.status()
        return {"version": status["version"], "host": status["host"]}

    routes = (
        ("status", "GET", lambda: public(source.status()), models.Status, "All that is known, as the badge reads it."),
        ("version", "GET", version, models.Version, "The versions of the extension and of the WebUI."),
        ("plans", "GET", lambda: plans(source.status()), list[models.Plan], "One entry for each size made ready."),
        (
            "reasons",
            "GET",
            lambda: source.status()["reasons_listed"],
            list[models.Reason],
            "Why steps were not accelerated, most frequent first.",
        ),
        ("report", "GET", lambda: {"text": source.report()}, models.ReportText, "The text for a bug report."),
        ("drop", "POST", lambda: {"dropped": source.drop()}, models.Dropped, "Drop all plans; they are made anew."),
    )
    prefixes = list(dict.fromkeys(("", source.subpath().rstrip("/"))))
    router = APIRouter()
    for prefix in prefixes:
        for name, method, give, model, words in routes:
            router.add_api_route(
                f"{prefix}{ROOT}/{name}",
                answering(give, changes=method == "POST"),
                methods=[method],
                responses={200: {"model": model}, 401: {"description": "The WebUI asks for a password"}},
                response_model=None,
                summary=words,
                name=f"sfast_{name}",
                tags=["Stable Fast"],
                include_in_schema=prefix == "",
            )
        router.add_api_route(
            f"{prefix}{ROOT}/help", answering(help_page.html, as_page=True), methods=["GET"], include_in_schema=False
        )
    # after a reload of the scripts the old routes would answer for the session before; in front, as a page that is
    # mounted below a path takes all that comes after it
    kept = [route for route in app.router.routes if f"{ROOT}/" not in getattr(route, "path", "")]
    app.router.routes[:] = [*router.routes, *kept]
    app.openapi_schema = None


def plans(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The plans of all networks, each with the name of its network."""
    return [{"network": each.get("name"), **plan} for each in status["accelerators"] for plan in each.get("plans", ())]


def same_site(request: Any) -> bool:
    """Whether a request comes from a page of this server, or from no page at all."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    if origin is None:
        return True
    hosts = (request.headers.get("host"), request.headers.get("x-forwarded-host"))
    return urlsplit(origin).netloc in hosts


def allowed(app: Any, request: Any, passwords: Mapping[str, str]) -> bool:
    """Whether a request may read the status."""
    page = getattr(app, "auth", None)  # Gradio's: passwords by user, or a function of both
    if page is None and not passwords:
        return True
    if page is not None:
        token = request.cookies.get("access-token") or request.cookies.get("access-token-unsecure")
        if token is not None and token in (getattr(app, "tokens", None) or {}):
            return True
    user, password = _basic(request.headers.get("authorization", ""))
    if user is None:
        return False
    if callable(page) and page(user, password):
        return True
    known = [each.get(user) for each in (passwords, page) if isinstance(each, Mapping)]
    return any(each is not None and compare_digest(each.encode(), password.encode()) for each in known)


def _basic(header: str) -> tuple[str | None, str]:
    scheme, _, value = header.partition(" ")
    if scheme.lower() != "basic":
        return None, ""
    try:
        user, _, password = base64.b64decode(value, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None, ""
    return user, password


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
