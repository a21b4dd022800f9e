"""The names of models that every command takes. No library is imported: `--help` lists them on any machine."""

from __future__ import annotations

NAMES = ("sd15", "sd15-inpaint", "sd21", "sdxl", "sdxl-refiner")
"""Shapes of `models.CONFIGURATIONS`, with random weights."""
TINY_NAMES = tuple(f"tiny-{name}" for name in NAMES)
TRANSFORMERS = ("z-image", "lumina2", "anima", "chroma", "flux")
"""Transformers, with random weights; see `transformers`."""
TINY_TRANSFORMERS = tuple(f"tiny-{name}" for name in TRANSFORMERS)
DIGITS = "tiny-digits"
"""The trained model of the project, which writes digits."""
ALL = (*NAMES, *TINY_NAMES, *TRANSFORMERS, *TINY_TRANSFORMERS, DIGITS)
TEXT_TO_IMAGE = ("sd15", "sd21", "sdxl", "tiny-sd15", "tiny-sd21", "tiny-sdxl", DIGITS)
"""Those that make an image of a text alone. The others need an image to begin with."""
