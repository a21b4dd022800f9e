"""What scripts are made of."""

from __future__ import annotations

from typing import Any

AlwaysVisible = object()


class Script:
    """What every script inherits."""

    def title(self) -> str:
        raise NotImplementedError

    def show(self, _is_img2img: bool) -> Any:
        return True

    def ui(self, _is_img2img: bool) -> Any:
        return []

    def before_process(self, p: Any, *args: Any) -> None:
        pass
