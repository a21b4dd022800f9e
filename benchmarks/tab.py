"""What the badge and the tab show after images on this machine: `python -m benchmarks.tab FILE`.

Images of several sizes in the place that the tests make for AUTOMATIC1111's adapter, with a real UNet of random
weights, then *Measure* for the same sizes. FILE takes the status and the measurements as JSON.
`tests/hosts/live/small_page.py` serves a page that shows them (SFAST_SMALL_PAGE_SHOWS=FILE), of which `photograph.py`
takes the image: so it has a GPU's times where there is none.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.small_cards.hosts import open_host
from benchmarks.small_cards.parts import NAMES, build
from sfast_ext.ui import requests

STEPS = 20
_LIMIT_S = 600  # of the measurement


def shown(model: str, sizes: str, steps: int, device: torch.device) -> dict[str, Any]:
    """The status and the measurements, after two images of each size.

    Args:
        sizes: as in the tab, "512x512, 768x512".

    Raises:
        RuntimeError: the measurement did not end well.
    """
    wanted = requests.from_text(sizes, "1", [])
    parts = build(model, device, torch.float16 if device.type == "cuda" else torch.float32)
    host = open_host(parts, device, "none", 0.0, ours=True)

    def make(size: requests.Wanted) -> None:
        host.image(size.width, size.height, steps, lambda part: None)

    try:
        session = host.session()
        for each in wanted:
            make(each)
            make(each)
        before = len(session.rehearsals.measurements.all())
        session.rehearsals.measure(wanted)
        end = time.monotonic() + _LIMIT_S
        while session.rehearsals.jobs.status()["state"] in ("waiting", "running") and time.monotonic() < end:
            time.sleep(0.1)
        measured = session.rehearsals.measurements.all()[before:]
        if not measured:
            raise RuntimeError(f"nothing was measured: {session.rehearsals.jobs.status()}")
        make(wanted[0])
        return {"status": session.status(), "measurements": measured}
    finally:
        host.close()


def main() -> None:
    """Write the file."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", choices=NAMES, default="sd15" if on_gpu else "tiny-sd15")
    parser.add_argument("--sizes", default="512x512, 768x512, 768x768" if on_gpu else "64x64, 128x64")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    given = parser.parse_args()
    found = shown(given.model, given.sizes, given.steps, torch.device(given.device))
    given.file.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
