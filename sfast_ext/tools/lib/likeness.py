"""How alike two images are: PSNR, SSIM and LPIPS."""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

HIGHEST = 200.0
"""Decibels of PSNR given to equal images."""


@dataclass(frozen=True)
class Likeness:
    """Of an image to another. None if a package is not installed."""

    psnr: float
    """Peak signal-to-noise ratio in decibels, `HIGHEST` at most; minus infinity if a value is not finite."""
    ssim: float | None
    """Structural similarity, 1 for equal images (Wang et al. 2004, by scikit-image)."""
    lpips: float | None
    """Learned perceptual distance, 0 for equal images (Zhang et al. 2018, AlexNet, by the package lpips)."""


def likeness(original: np.ndarray, other: np.ndarray) -> Likeness:
    """Compare two images (height, width, 3) of values from 0 to 1."""
    if not np.isfinite(original).all() or not np.isfinite(other).all():
        return Likeness(-math.inf, None, None)
    a, b = original.astype(np.float64), other.astype(np.float64)
    error = float(np.mean((a - b) ** 2))
    psnr = min(HIGHEST, -10 * math.log10(error)) if error > 0 else HIGHEST
    return Likeness(psnr, _ssim(a, b), _lpips(original, other))


def missing() -> list[str]:
    """What is not measured, and what to install for it, a sentence each."""
    return [reason for _, reason in (_structural(), _learned()) if reason]


@functools.cache
def _structural() -> tuple[Any, str]:
    try:
        return importlib.import_module("skimage.metrics").structural_similarity, ""
    except Exception as exc:  # one built for another NumPy raises anything
        return None, f"SSIM is not measured: install scikit-image ({type(exc).__name__}: {exc})."


@functools.cache
def _learned() -> tuple[Any, str]:
    try:
        network = importlib.import_module("lpips").LPIPS(net="alex", verbose=False)
    except Exception as exc:  # its weights are downloaded at first
        return None, f"LPIPS is not measured: install lpips, which downloads AlexNet ({type(exc).__name__}: {exc})."
    return network.eval().requires_grad_(False), ""


def _ssim(a: np.ndarray, b: np.ndarray) -> float | None:
    measure, _ = _structural()
    # its window has 7 pixels
    return None if measure is None or min(a.shape[:2]) < 7 else float(measure(a, b, channel_axis=-1, data_range=1.0))


def _lpips(a: np.ndarray, b: np.ndarray) -> float | None:
    import torch

    network, _ = _learned()
    if network is None:
        return None
    images = [torch.from_numpy(x.astype(np.float32)).permute(2, 0, 1)[None] * 2 - 1 for x in (a, b)]
    with torch.no_grad():
        return float(network(*images))
