"""Fixtures of the tests that drive AUTOMATIC1111, where a module says by `ROUND`, `prepare` and `SETTINGS` what it
needs, and of those in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("PIL")
from . import a1111
from .browser import Page, opened
from .pages import HOSTS, THEMES, quick, running


@pytest.fixture(scope="session")
def a1111_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tiny models, shared by all modules."""
    folder = tmp_path_factory.mktemp("a1111-models")
    a1111.make_models(folder)
    return folder


@pytest.fixture(scope="module")
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, a1111_models: Path) -> Path:
    """A data directory with those models, the checkout among the extensions, and what the module's `prepare` adds."""
    folder = a1111.make_data(tmp_path_factory.mktemp("a1111"), a1111_models)
    prepare = getattr(request.module, "prepare", None)
    if prepare is not None:
        prepare(folder)
    return folder


@pytest.fixture(scope="module")
def stock(request: pytest.FixtureRequest, data: Path) -> dict[str, list[str]]:
    """The images of the module's `ROUND` as the WebUI makes them by itself."""
    settings = {**getattr(request.module, "SETTINGS", {}), "disabled_extensions": ["stable-fast"]}
    with a1111.start(data, "stock", settings) as webui:
        return a1111.Played(webui).round(request.module.ROUND, status=False).images


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, data: Path, stock: dict[str, list[str]]) -> Iterator[a1111.Played]:
    """The WebUI with the extension after the round, its images, and the status after each of its steps."""
    settings = {**getattr(request.module, "SETTINGS", {}), "sfast_allow_cpu": True}
    with a1111.start(data, "extended", settings) as webui:
        yield a1111.Played(webui).round(request.module.ROUND, status=True)


@pytest.fixture(scope="module", params=HOSTS)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page that is open where images are made, with a small one set."""
    pytest.importorskip("playwright.sync_api")
    name = request.param
    images = tmp_path_factory.mktemp(f"images-{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SFAST_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        with (
            running(name, tmp_path_factory) as webui,
            opened(webui.url, name if name in THEMES else "", images) as page,
        ):
            page.starts = lambda: webui.log().count(a1111.STARTED)
            page.open()
            page.to_images()
            # SD.Next's tiny model is too quick for stages to be seen, at small sizes
            quick(page, **({"width": "512", "height": "512"} if name in THEMES else {}))
            yield page
