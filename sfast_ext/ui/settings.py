"""Settings > Stable Fast: the options made from `settings_table`, and the configuration read from them."""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sfast_ext import environment
from sfast_ext.config import BOUNDS
from sfast_ext.report import Report
from sfast_ext.ui.settings_table import (
    ALL,
    CHECK_LABELS,
    EIGHT,
    FASTER,
    HEADINGS,
    KEYS,
    LEVELS,
    LOG_LEVEL,
    PRESET,
    SETTINGS,
    SIZES_OF_SMALL,
    SMALL,
    WORDS,
    HostConfig,
    Setting,
    named_now,
)

SECTION = ("stable_fast", "Stable Fast")
CATEGORY = ("stable_fast", "Acceleration")
"""The heading above the section in AUTOMATIC1111, which has "Uncategorized" for who names none."""

logger = logging.getLogger("sfast_ext")

SWITCHED = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}
"""What the words of a switch mean."""

_announced: dict[str, str] = {}
"""The invalid value of each setting that was reported last."""
_last_valid: dict[str, Any] = {}
"""The last valid value of each setting, as Config has it."""


def default_of(setting: Setting) -> Any:
    """The value that the WebUI shows until the user chooses one."""
    if setting.key in WORDS:
        return WORDS[setting.key]
    if setting.field == "graph_memory_mb":
        return _default_budget(setting)
    return _displayed(setting, getattr(HostConfig(), setting.field))


def _displayed(setting: Setting, value: Any) -> Any:
    """A value of Config as the WebUI shows it."""
    return next(name for name, check in CHECK_LABELS.items() if check == value) if setting.choices else value


def _default_budget(setting: Setting) -> int:
    """MB for CUDA graphs on this GPU, in the steps of the slider."""
    assert setting.slider is not None
    step = int(setting.slider[1])
    return environment.graph_budget_mb() // step * step


def _memory_of_gpu(most: float, step: float) -> float:
    """The GPU's memory in MB, in steps of the slider: more cannot be spent. `most` without a GPU."""
    total = environment.gpu_memory()
    return most if total is None else (total >> 20) // int(step) * int(step)


def register(opts: Any, option_info: Callable[..., Any]) -> None:
    """Add the settings to those of a WebUI, group by group. May be called again.

    Args:
        opts: `shared.opts` of AUTOMATIC1111 or SD.Next.
        option_info: its `OptionInfo`.
    """
    page = _Page(option_info)
    for group, (key, text) in HEADINGS.items():
        opts.add_option(key, page.heading(text))
        for setting in ALL:
            if setting.group == group:
                opts.add_option(setting.key, page.option(setting))
    stored = getattr(opts, "data", None)
    if isinstance(stored, dict):
        # a page shows none of the choices as chosen if the stored one has another name
        stored.update({key: named_now(key, stored[key]) for key in KEYS if key in stored})


def forgetting(opts: Any) -> Callable[[], None]:
    """What takes out of a WebUI's settings all of these that are not among them now."""
    ours = {setting.key for setting in ALL} | {key for key, _ in HEADINGS.values()}
    places = [each for each in (opts.data_labels, getattr(opts, "data", None)) if isinstance(each, dict)]
    added = [(place, [key for key in ours if key not in place]) for place in places]

    def forget() -> None:
        for place, keys in added:
            for key in keys:
                place.pop(key, None)

    return forget


class _Page:
    """Makes options as a WebUI has them. What it offers next to `OptionInfo` lies in the same module."""

    def __init__(self, option_info: Callable[..., Any]) -> None:
        self._option_info = option_info
        around = sys.modules.get(getattr(option_info, "__module__", ""))
        # AUTOMATIC1111 alone; SD.Next makes headings of plain options
        self._html = getattr(around, "OptionHTML", None)
        # SD.Next has .info() but does not show it; it does show gradio's own line under the label. Only SD.Next's
        # OptionInfo has `validate`.
        self._shows_comments = hasattr(option_info, "info") and not hasattr(option_info, "validate")
        categories = getattr(around, "categories", None)
        self._category = categories.register_category(*CATEGORY) if categories is not None else None

    def heading(self, text: str) -> Any:
        """A line of HTML between options."""
        import gradio

        option = self._html(text) if self._html is not None else self._option_info(text, "", gradio.HTML)
        return self._placed(option)

    def option(self, setting: Setting) -> Any:
        """The option of a setting, with what it costs and gives."""
        component, arguments = _component(setting)
        if not self._shows_comments:
            arguments["info"] = setting.info
        option = self._option_info(default_of(setting), setting.label, component, arguments, section=SECTION)
        # AUTOMATIC1111 reads it there; SD.Next has another list
        option.infotext = setting.infotext
        return self._placed(option.info(setting.info) if self._shows_comments else option)

    def _placed(self, option: Any) -> Any:
        option.section, option.category_id = SECTION, self._category
        return option


def _component(setting: Setting) -> tuple[Any, dict[str, Any]]:
    import gradio

    if setting.slider is not None:
        maximum, step = setting.slider
        bounds = BOUNDS[setting.field]
        if setting.field == "graph_memory_mb":
            maximum = _memory_of_gpu(maximum, step)
        minimum = step if bounds.excluded else bounds.minimum
        return gradio.Slider, {"minimum": minimum, "maximum": maximum, "step": step}
    if setting.choices:
        return gradio.Radio, {"choices": list(setting.choices)}
    return gradio.Checkbox, {}


def config_from(opts: Any, report: Report | None = None) -> HostConfig:
    """The configuration that the user has chosen. An invalid value is reported once, and the last valid value, or the
    default, stays in use.

    Options that are not registered yet have their default: a WebUI may load its model before it asks for settings.
    Text such as "false", which requests to the API may contain, is converted.
    """
    config = HostConfig()
    for setting in SETTINGS:
        value = getattr(opts, setting.key, None)
        if value is None:
            continue
        try:
            converted = _converted(setting, value)
            config = replace(config, **{setting.field: converted})
        except (TypeError, ValueError, OverflowError):
            kept = _last_valid.get(setting.key, getattr(config, setting.field))
            config = replace(config, **{setting.field: kept})
            _announce(setting, value, default_of(setting) if kept is None else kept, report)
        else:
            _last_valid[setting.key] = converted
            _announced.pop(setting.key, None)
    preset = _word(PRESET, opts, report)
    if preset == FASTER:
        return replace(config, faster_sums=True)
    if preset == EIGHT:
        return replace(config, eight_bits=True)
    return _on_small_card(config) if preset == SMALL else config


@functools.lru_cache(maxsize=None)
def _total_memory() -> int | None:
    # the status reads the configuration, and asks nothing of the GPU
    return environment.gpu_memory()


def _on_small_card(config: HostConfig) -> HostConfig:
    total = _total_memory()
    # in the steps of the slider, one at least: 0 would be no limit
    eighth = environment.MAX_FOR_GRAPHS_MB // 8 if total is None else total >> 23
    most = max(256, eighth // 256 * 256)
    chosen = config.graph_memory_mb or most
    return replace(config, graph_memory_mb=min(chosen, most), max_graphs=min(config.max_graphs, SIZES_OF_SMALL))


def log_level(opts: Any, report: Report | None = None) -> int:
    """The level of the extension's logger that the user has chosen; see `config_from` for invalid values."""
    return LEVELS[_word(LOG_LEVEL, opts, report)]


def _word(setting: Setting, opts: Any, report: Report | None) -> str:
    """The chosen word of a setting that is no field of Config."""
    value = named_now(setting.key, getattr(opts, setting.key, None))
    if value is None:
        return WORDS[setting.key]
    if isinstance(value, str) and value in setting.choices:
        _last_valid[setting.key] = value
        _announced.pop(setting.key, None)
        return value
    kept: str = _last_valid.get(setting.key, WORDS[setting.key])
    _announce(setting, value, kept, report)
    return kept


def infotext(config: HostConfig) -> dict[str, Any]:
    """What a configuration adds to an image's infotext: settings that can change pixels and are not at their default,
    by the name that they have there."""
    chosen = [(each, _displayed(each, getattr(config, each.field))) for each in SETTINGS if each.infotext is not None]
    return {str(each.infotext): value for each, value in chosen if value != default_of(each)}


def restored(params: dict[str, Any]) -> None:
    """Complete the parameters that a host read from an infotext: a setting that is not named had its default."""
    if "Steps" not in params:
        return  # a prompt alone
    for each in SETTINGS:
        if each.infotext is not None:
            params.setdefault(each.infotext, str(default_of(each)))


def accepts(setting: Setting, value: Any) -> bool:
    """Whether this is a valid value of the setting."""
    if setting.key in WORDS:
        return isinstance(value, str) and named_now(setting.key, value) in setting.choices
    try:
        replace(HostConfig(), **{setting.field: _converted(setting, value)})
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _converted(setting: Setting, value: Any) -> Any:
    """An option's value as Config has it.

    Raises:
        TypeError, ValueError, OverflowError: the value is not valid.
    """
    kind = setting.kind
    if setting.choices:
        if not isinstance(value, str):
            raise TypeError(type(value).__name__)
        if value not in CHECK_LABELS:
            raise ValueError(value)
        return CHECK_LABELS[value]
    if kind is bool:
        word = value.strip().lower() if isinstance(value, str) else None
        if word in SWITCHED:
            return SWITCHED[word]
        if value not in (True, False):
            raise ValueError(value)
        return bool(value)
    if isinstance(value, bool):
        raise TypeError("bool")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    # a slider gives 16.0 for 16
    return int(number) if kind is int else number


def _announce(setting: Setting, value: Any, kept: Any, report: Report | None) -> None:
    said = repr(value)
    if _announced.get(setting.key) == said:
        return
    _announced[setting.key] = said
    used = kept if setting.key in WORDS else _displayed(setting, kept)
    message = f"{setting.key} ({setting.label}) = {said} is not valid; {used!r} stays in use. Valid: {setting.valid}"
    if report is not None:
        report.event("settings", message)
    else:
        logger.warning("settings: %s", message)
