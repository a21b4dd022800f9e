"""Who may read the status and the report, and who may change anything: whom the WebUI itself admits."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from secrets import compare_digest
from typing import Any
from urllib.parse import urlsplit


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


def page_may_read(app: Any, request: Any, passwords: Mapping[str, str]) -> bool:
    """Whether a function of the page may answer with what the routes give.

    Args:
        request: what Gradio gives such a function; its headers are the browser's.
    """
    if not passwords or getattr(app, "auth", None) is not None:
        # Gradio calls no function for a browser that is not logged in to a page with a password
        return True
    # Gradio's queue gives its own objects in place of mappings
    given = getattr(request, "headers", None)
    headers = {str(name).lower(): str(value) for name, value in dict(given or {}).items()}
    user, password = _basic(headers.get("authorization", ""))
    known = passwords.get(user) if user is not None else None
    return known is not None and compare_digest(known.encode(), password.encode())
