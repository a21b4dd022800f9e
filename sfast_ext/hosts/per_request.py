"""Settings of one request, by the hosts' `alwayson_scripts`: {"Stable Fast": {"args": [{"enabled": false}]}}.

They become the request's own `override_settings`, which a host sets before the image and restores after it.
"""

from __future__ import annotations

from typing import Any

from sfast_ext.ui import settings, settings_table, tab

NAME = "Stable Fast"
_IGNORED = "sfast_ignored"
FORCED = "sfast_forced"
"""The attribute of a request with settings that count whatever it has chosen."""
_LONGEST = 60


def script() -> type:
    """The script that a host finds by its name. It shows nothing on the page."""
    from modules import scripts

    base: Any = scripts.Script

    class PerRequest(base):  # type: ignore[misc]
        """For the API. Hosts know a script by its class."""

        # a group without a component would leave a gap on the page of AUTOMATIC1111
        create_group = False

        def title(self) -> str:
            """Its name in a request."""
            return NAME

        def show(self, _is_img2img: bool) -> Any:
            """Hosts take arguments of a request for such scripts alone."""
            return scripts.AlwaysVisible

        def ui(self, _is_img2img: bool) -> list[Any]:
            """One argument: a host drops what it has no component for, and never calls a script that has none."""
            return [tab.unseen()]

        def before_process(self, p: Any, chosen: Any = None, *_: Any, **__: Any) -> None:
            """Both hosts call it before they apply `override_settings`."""
            apply(p, chosen)

    return PerRequest


def apply(p: Any, chosen: Any) -> None:
    """Let a request's settings count for its images.

    Args:
        p: the host's processing object.
        chosen: values by the names of settings, with or without "sfast_" before them; true or false alone switches
            the extension. None: nothing was chosen.
    """
    values, ignored = _read(chosen)
    p.override_settings = {**(p.override_settings or {}), **values, **getattr(p, FORCED, {})}
    setattr(p, _IGNORED, ignored)


def ignored(p: Any) -> list[str]:
    """What a request named that is no setting, or no value of that setting."""
    return list(getattr(p, _IGNORED, ()))


def _read(chosen: Any) -> tuple[dict[str, Any], list[str]]:
    if chosen is None:
        return {}, []
    if isinstance(chosen, bool):
        chosen = {"enabled": chosen}
    if not isinstance(chosen, dict):
        return {}, [repr(chosen)[:_LONGEST]]
    values, refused = {}, []
    known = {name: each for each in settings_table.ALL for name in (each.key, each.key.partition("_")[2])}
    for name, value in chosen.items():
        setting = known.get(name)
        if setting is not None and settings.accepts(setting, value):
            values[setting.key] = value
        else:
            refused.append(f"{name}: {value!r}"[:_LONGEST])
    return values, refused
