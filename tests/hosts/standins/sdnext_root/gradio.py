"""The names of gradio that settings are made of."""

from __future__ import annotations


class Checkbox: ...


class Radio: ...


class Slider: ...


class HTML: ...
