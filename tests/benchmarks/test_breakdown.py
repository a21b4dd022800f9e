"""What an image's time is made of, from spans that are written down here."""

from __future__ import annotations

import pytest

from benchmarks.webui.breakdown import Span, innermost, lines, mean, of_image

MS = 1_000_000
REQUEST = [
    Span("request", 0, 100 * MS),
    Span("API", 10 * MS, 90 * MS),
    Span("sampler", 20 * MS, 80 * MS),
    Span("UNet", 20 * MS, 30 * MS),
    Span("UNet", 40 * MS, 50 * MS),
    Span("torch_gc", 80 * MS, 90 * MS),
]


def test_each_moment_belongs_to_the_innermost_phase():
    pieces = innermost(reversed(REQUEST))
    assert [(piece.name, piece.begin // MS, piece.end // MS) for piece in pieces] == [
        ("request", 0, 10),
        ("API", 10, 20),
        ("UNet", 20, 30),
        ("sampler", 30, 40),
        ("UNet", 40, 50),
        ("sampler", 50, 80),
        ("torch_gc", 80, 90),
        ("request", 90, 100),
    ]
    assert innermost([]) == []


def test_the_gpu_waits_for_the_phase_in_which_it_runs_nothing():
    found = of_image(REQUEST, [(25 * MS, 45 * MS), (45 * MS, 60 * MS), (85 * MS, 86 * MS)])
    assert found["request_ms"] == 100 and found["gpu_busy_ms"] == 36
    assert found["phases"] == {
        "request": {"cpu_ms": 20, "gpu_idle_ms": 20},
        "API": {"cpu_ms": 10, "gpu_idle_ms": 10},
        "UNet": {"cpu_ms": 20, "gpu_idle_ms": 5},
        "sampler": {"cpu_ms": 40, "gpu_idle_ms": 20},
        "torch_gc": {"cpu_ms": 10, "gpu_idle_ms": 9},
    }
    idle = sum(phase["gpu_idle_ms"] for phase in found["phases"].values())
    assert idle + found["gpu_busy_ms"] == found["request_ms"]


def test_a_phase_that_one_image_lacks_counts_for_nothing_there():
    longer, shorter = of_image(REQUEST, []), of_image([Span("request", 0, 50 * MS)], [(0, 10 * MS)])
    found = mean([longer, shorter])
    assert found["request_ms"] == 75 and found["gpu_busy_ms"] == 5
    assert found["phases"]["UNet"] == {"cpu_ms": 10, "gpu_idle_ms": 10}
    assert found["phases"]["request"] == {"cpu_ms": pytest.approx(35), "gpu_idle_ms": pytest.approx(30)}
    told = lines("stock", found)
    assert told[0].split() == ["stock:", "75", "ms,", "in", "which", "the", "GPU", "ran", "for", "5"]
    assert told[1].split()[0] == "request" and len(told) == 1 + len(found["phases"])
