"""Settings: read by attribute, known defaults first, unknown names raise."""

from __future__ import annotations

from typing import Any


class OptionInfo:
    def __init__(
        self,
        default: Any = None,
        label: str = "",
        component: Any = None,
        component_args: Any = None,
        onchange: Any = None,
        section: Any = None,
        **_kwargs: Any,
    ) -> None:
        self.default, self.label, self.section = default, label, section
        self.component, self.component_args = component, component_args
        self.onchange, self.comment_after = onchange, ""

    def info(self, text: str) -> OptionInfo:
        self.comment_after += text
        return self

    def needs_reload_ui(self) -> OptionInfo:
        return self


class Options:
    def __init__(self, **values: Any) -> None:
        super().__setattr__("data", dict(values))
        super().__setattr__("data_labels", {})

    def __getattr__(self, name: str) -> Any:
        data, labels = self.__dict__["data"], self.__dict__["data_labels"]
        if name in data:
            return data[name]
        if name in labels:
            return labels[name].default
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.data[name] = value

    def add_option(self, name: str, info: OptionInfo) -> None:
        self.data_labels[name] = info
        self.data.setdefault(name, info.default)
