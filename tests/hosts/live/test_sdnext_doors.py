"""Who may change anything in the real SD.Next, under all flags that open or close its own API."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from . import sdnext
from .a1111 import STARTED
from .doors import ADMITTED, UP, asked, changed
from .webui import WebUI

pytestmark = sdnext.MARKS
FILE = "users"
GIVEN = {"--auth": "one:two", "--auth-file": FILE, "--listen": ""}
COMBINATIONS = [given for n in range(len(GIVEN) + 1) for given in itertools.combinations(GIVEN, n)]
# it takes this one for the sake of others, and does not heed it
GIVEN["--api-auth"] = "api:three"
COMBINATIONS += [("--api-auth",), ("--api-auth", "--auth")]
USERS = {"--auth": "one:two", "--auth-file": "three:four"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with a file of users."""
    folder = sdnext.make_data(tmp_path_factory)
    (folder / FILE).write_text("three:four\n", encoding="utf-8")
    return folder


def started(data: Path, *flags: str) -> WebUI:
    """SD.Next with these flags, without a model."""
    named = " ".join(str(data / FILE) if each == FILE else each for each in flags)
    settings = {"sd_checkpoint_autoload": False}
    return sdnext.start(data, settings, extension=True, flags=named, ready=UP, said=STARTED)


@pytest.mark.parametrize("given", COMBINATIONS, ids=lambda given: " ".join(given) or "no flag")
def test_changing_routes_are_as_closed_as_sdnext_s_own(data: Path, given: tuple[str, ...]) -> None:
    with started(data, *(each for name in given for each in (name, GIVEN[name]) if each)) as webui:
        users = [USERS[name] for name in given if name in USERS]
        guarded = bool(users)
        assert asked(webui, "/sdapi/v1/interrupt") == (401 if guarded else 204)
        assert asked(webui, "/sfast/v1/status", method="GET") == (401 if guarded else 200)
        refused = {401} if guarded else ADMITTED
        for user in ("", "one:four", "three:two", "api:three", "nobody:"):
            assert changed(webui, user=user) == refused, user
        for user in users:
            assert asked(webui, "/sdapi/v1/interrupt", user=user) == 204
            assert changed(webui, user=user) == ADMITTED, user
        assert changed(webui, Origin="http://evil.example") == ({401} if guarded else {403})


def test_a_user_without_a_password_closes_them_too(data: Path) -> None:
    # SD.Next's page is open then, and its API is not
    with started(data, "--auth", "one:") as webui:
        assert asked(webui, "/sdapi/v1/interrupt") == 401
        assert changed(webui) == changed(webui, user="one:two") == {401}
        assert asked(webui, "/sdapi/v1/interrupt", user="one:") == 204
        assert changed(webui, user="one:") == ADMITTED
