"""The callbacks that really fire; an exception of one is printed and forgotten."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

callback_map: dict[str, list[Callable[..., Any]]] = {
    name: []
    for name in (
        "model_loaded",
        "before_process",
        "before_ui",
        "ui_settings",
        "ui_tabs",
        "infotext_pasted",
        "app_started",
        "script_unloaded",
    )
}
exceptions: list[BaseException] = []


def fire(name: str, *args: Any) -> None:
    for callback in callback_map[name]:
        try:
            callback(*args)
        except Exception as exc:
            traceback.print_exc()
            exceptions.append(exc)


def on_model_loaded(callback: Callable[..., Any]) -> None:
    callback_map["model_loaded"].append(callback)


def on_before_process(callback: Callable[..., Any]) -> None:
    callback_map["before_process"].append(callback)


def on_ui_settings(callback: Callable[..., Any]) -> None:
    callback_map["ui_settings"].append(callback)


def on_before_ui(callback: Callable[..., Any]) -> None:
    callback_map["before_ui"].append(callback)


def on_ui_tabs(callback: Callable[..., Any]) -> None:
    callback_map["ui_tabs"].append(callback)


def on_app_started(callback: Callable[..., Any]) -> None:
    callback_map["app_started"].append(callback)


def on_infotext_pasted(callback: Callable[..., Any]) -> None:
    callback_map["infotext_pasted"].append(callback)


def on_script_unloaded(callback: Callable[..., Any]) -> None:
    callback_map["script_unloaded"].append(callback)
