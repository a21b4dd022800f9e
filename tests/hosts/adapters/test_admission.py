"""Who may change anything, under all flags of the WebUI that open or close its own API."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="needs stable-diffusion-sdkit without its pins")

from ui.test_api import CHANGING, change, client

from hosts.adapters.test_a1111 import host  # noqa: F401
from sfast_ext.hosts.a1111 import adapter
from sfast_ext.ui import api

fastapi = pytest.importorskip("fastapi")
pytest.importorskip("httpx")

FLAGS = ("api", "api_auth", "gradio_auth", "listen")
PASSWORDS = {"api_auth": "api:one,second:two", "gradio_auth": {"page": "three"}}


@pytest.mark.parametrize("given", itertools.product([False, True], repeat=len(FLAGS)), ids=str)
def test_changing_routes_are_as_closed_as_the_webui_s_own(host, given):  # noqa: F811
    """A1111 serves its API with --api, behind --api-auth if that is given, and its page behind --gradio-auth."""
    flags = dict(zip(FLAGS, given))
    options = vars(host.shared.cmd_opts)
    options.update(api=flags["api"], listen=flags["listen"], nowebui=False)
    options["api_auth"] = PASSWORDS["api_auth"] if flags["api_auth"] else None
    adapter.start("test")
    app = fastapi.FastAPI()
    # as gradio has it on its application
    app.auth, app.tokens = PASSWORDS["gradio_auth"] if flags["gradio_auth"] else None, {}
    host.fire("app_started", None, app)
    guarded = flags["api_auth"] or flags["gradio_auth"]

    def codes(**how):
        return {change(app, name, **how).status_code for name in CHANGING}

    if not flags["api"]:
        assert codes() == codes(auth=("api", "one")) == {404}
    else:
        # 409: there is no image to go by
        admitted = {200, 409}
        assert codes() == codes(auth=("api", "three")) == codes(auth=("nobody", "")) == ({401} if guarded else admitted)
        if flags["api_auth"]:
            assert codes(auth=("api", "one")) == codes(auth=("second", "two")) == admitted
        if flags["gradio_auth"]:
            assert codes(auth=("page", "three")) == admitted
        evil = {"origin": "http://evil.example"}
        assert codes(headers=evil) == ({401} if guarded else {403})
    assert client(app).get(api.STATUS).status_code == (401 if guarded else 200)
