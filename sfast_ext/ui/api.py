"""The report over HTTP. Routes added here pass by the WebUI's own authentication, so none of them changes anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

STATUS = "/sfast/v1/status"


def register(app: Any, status: Callable[[], dict[str, Any]]) -> None:
    """Add GET /sfast/v1/status to a FastAPI application; once, however often a WebUI starts the same application.

    Args:
        app: the application that `on_app_started` hands over.
        status: called for each request.
    """
    from starlette.responses import JSONResponse

    # FastAPI evaluates this annotation among the module's names, where JSONResponse is none
    def answer() -> Any:
        return JSONResponse(json_safe(status()), headers={"Cache-Control": "no-store"})

    # after the scripts were reloaded the old route would answer for a session that is gone
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) != STATUS]
    app.add_api_route(STATUS, answer, methods=["GET"], response_class=JSONResponse, response_model=None)


def json_safe(value: Any) -> Any:
    """The same in what JSON knows: numbers that are not finite become None, other objects their text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_safe(v) for v in value]
    return str(value)
