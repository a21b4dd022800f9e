"""Whole UNets at odd sizes, batches of 1 to 16: in fp16 at their real widths on a GPU, tiny ones in fp32 on a CPU."""

from __future__ import annotations

import pytest
import torch

from sfast_ext import Config, accelerate
from sfast_ext.runtime.verify import relative_error
from sfast_ext.tools.lib import exact, models

# rows of a batch, width and height
TINY = [(1, 64, 64), (2, 72, 40), (3, 56, 88), (16, 64, 72)]
SMALL = [
    (1, 512, 512),
    (2, 904, 520),
    (3, 520, 904),
    (4, 1160, 200),
    (5, 328, 1016),
    (6, 512, 768),
    (7, 64, 72),
    (8, 456, 616),
    (12, 264, 392),
    (16, 512, 512),
]
LARGE = [
    (1, 1024, 1024),
    (2, 904, 1160),
    (2, 1536, 1544),
    (3, 840, 1000),
    (4, 1304, 392),
    (6, 136, 72),
    (8, 520, 776),
    (16, 512, 640),
]
CASES = [
    *[
        pytest.param(f"tiny-{name}", "cpu", sizes, id=f"tiny {name}")
        # each size in one or two of them; the largest batch, which takes as long as all others, once
        for name, sizes in (("sd15", TINY[2:]), ("sd15-inpaint", TINY[1:2]), ("sd21", TINY[2:3]), ("sdxl", TINY[:2]))
    ],
    *[
        pytest.param(name, "cuda", sizes, id=name, marks=pytest.mark.gpu(gigabytes=gigabytes))
        for name, sizes, gigabytes in (
            ("sd15", SMALL, 12),
            ("sd15-inpaint", SMALL[1:4], 12),
            ("sd21", SMALL, 12),
            ("sdxl", LARGE, 32),
        )
    ],
]


@pytest.mark.long(but=[1, 3])
@torch.no_grad()
@pytest.mark.parametrize(("name", "device", "sizes"), CASES)
def test_every_plan_is_as_near_to_fp32_as_the_original(name, device, sizes):
    dtype = torch.float16 if device == "cuda" else torch.float32
    unet = models.random_unet(name, dtype=dtype, device=device)
    original, target = unet.forward, exact.Exact(unet)
    # others run beside it: what is faster is not asked here
    accelerator = accelerate(unet, Config(allow_cpu=True, drop_slower=False, max_plans=len(sizes)))
    for rows, width, height in sizes:
        for seed in range(2):  # the second is other values for the plan that the first made
            given = models.unet_inputs(unet, width, height, (rows + 1) // 2, seed=seed, timestep=601 - 300 * seed)
            args, kwargs = exact.rows(given, len(given[0][0]), slice(0, rows))
            wanted = target(args, kwargs)
            if not seed:
                unet(*args, **kwargs)
            ours, theirs = unet(*args, **kwargs)[0], original(*args, **kwargs)[0]
            assert ours.shape == theirs.shape == wanted.shape
            limit = 1.2 * relative_error([theirs.float()], [wanted]) if device == "cuda" else 1e-5
            assert relative_error([ours.float()], [wanted]) <= limit, (rows, width, height, seed)
        status = accelerator.report.as_dict()
        assert not status["reasons"] and status["last_error"] is None, (rows, width, height)
    counters = status["counters"]
    assert counters["captures"] == len(sizes)
    assert counters["replays" if device == "cuda" else "eager_runs"] == 2 * len(sizes), counters
