"""The status over HTTP, read-only, for users whom the WebUI admits."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Mapping
from secrets import compare_digest
from typing import Any

STATUS = "/sfast/v1/status"


def register(
    app: Any, status: Callable[[], dict[str, Any]], passwords: Callable[[], Mapping[str, str]] | None = None
) -> None:
    """Add GET /sfast/v1/status to a FastAPI application. A second call replaces the route of the first.

    Where the WebUI requires a password, for its page or for its API, so does the route: it admits a browser that is
    logged in to the page, and HTTP basic authentication with the user and password of either.

    Args:
        app: the application that `on_app_started` passes.
        status: called for each request.
        passwords: gives the passwords of the WebUI's API by user; empty where it requires none.
    """
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    def answer(request: Any) -> Any:
        if not allowed(app, request, {} if passwords is None else passwords()):
            # the badge's own request must not make the browser ask for a password
            asks = "text/html" in request.headers.get("accept", "")
            headers = {"WWW-Authenticate": "Basic"} if asks else {}
            return JSONResponse({"detail": "Unauthorized"}, status_code=401, headers=headers)
        return JSONResponse(json_safe(public(status())), headers={"Cache-Control": "no-store"})

    # after a reload of the scripts the old route would answer for the session before
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) != STATUS]
    app.router.routes.append(Route(STATUS, answer, methods=["GET"], include_in_schema=False))


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
    """The value in types that JSON has. Numbers that are not finite become None, other objects their text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_safe(v) for v in value]
    return str(value)
