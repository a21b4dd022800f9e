"""Milliseconds in which a PNG file is made, by Pillow and by `sfast_ext.parallel_png`, and its bytes.

    python -m benchmarks.parallel_png --threads 2 --threads 6 --threads 16

Of noise, as models of random weights make it, and of noise with the spectrum of photographs. Both ways in turns, in
memory; the median of `--times`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
from PIL import Image

from sfast_ext import parallel_png
from sfast_ext.tools.lib.machine import describe

SIZES = (512, 1024, 2048)
CONTRAST = 50


def noise(size: int) -> np.ndarray:
    """(size, size, 3), each value as likely as the others."""
    return np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)


def photograph(size: int) -> np.ndarray:
    """(size, size, 3), amplitudes that fall as the frequency rises."""
    waves = np.fft.fft2(np.random.default_rng(0).standard_normal((size, size, 3)), axes=(0, 1))
    across = np.fft.fftfreq(size)
    values = np.fft.ifft2(waves / (np.hypot(*np.meshgrid(across, across))[..., None] + 1 / size), axes=(0, 1)).real
    return np.clip(128 + CONTRAST * values / values.std(), 0, 255).astype(np.uint8)


def measured(pixels: np.ndarray, threads: list[int], times: int) -> dict[str, object]:
    """The row of one image."""
    im, numbers = Image.fromarray(pixels), threads or [parallel_png._threads(pixels.size)]
    taken: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    for number in range(times + 1):
        for name, wanted in [("Pillow", 0), *((f"{each} threads", each) for each in numbers)]:
            remove: Callable[[], None] = parallel_png.install(lambda: True) if wanted else lambda: None
            file = io.BytesIO()
            with mock.patch.object(parallel_png, "_threads", lambda size, wanted=wanted: wanted):
                began = time.perf_counter()
                im.save(file, "PNG")
                seconds = time.perf_counter() - began
            remove()
            sizes[name] = len(file.getvalue())
            if number:
                taken.setdefault(name, []).append(1e3 * seconds)
    return {
        "size": im.width,
        "ms": {name: round(statistics.median(each), 1) for name, each in taken.items()},
        "bytes": sizes,
    }


def main() -> None:
    """Print all rows as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, action="append", help="default: as many as the extension uses")
    parser.add_argument("--times", type=int, default=7)
    given = parser.parse_args()
    threads = given.threads or []
    rows = [
        {"of": of.__name__, **measured(of(size), threads, given.times)} for of in (noise, photograph) for size in SIZES
    ]
    print(json.dumps({"machine": describe(), "cores": os.cpu_count(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
