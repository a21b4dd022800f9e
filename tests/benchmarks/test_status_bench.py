"""What `benchmarks.status` measures, on a model that is tiny."""

from __future__ import annotations

import urllib.request
from types import SimpleNamespace

import pytest
import torch

from benchmarks import status


def test_a_status_that_asks_the_gpu_is_noticed():
    def asks():
        return torch.cuda.is_available()

    assert len(status.status_ms(SimpleNamespace(status=dict), times=5)) == 5
    with pytest.raises(AssertionError, match="is_available was called"):
        status.status_ms(SimpleNamespace(status=asks))


def test_another_process_asks_as_often_as_it_is_told(monkeypatch):
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    from ui.test_api import source, state

    # otherwise a status is given again for a moment
    monkeypatch.setattr(status.api, "STATUS_KEPT_S", 0)
    answered = []
    with status.served(source(lambda: answered.append(1) or state())) as port:
        asked = status.Asked(port, 50)
        while asked.times < 5:
            assert asked._process.poll() is None
        asked.close()
        assert len(answered) >= 5
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/sfast/v1/status") as answer:
            assert answer.status == 200


def test_the_steps_of_an_image_are_timed_without_what_comes_before_and_after():
    class Host:
        device = torch.device("cpu")

        def image(self, width, height, steps, at):
            for part in ("the prompt", *[status.STEP] * steps, "the VAE", "the end"):
                at(part)

    assert 0 <= status.steps_s(Host(), 64, 3) < 1


@pytest.mark.long
def test_a_row_is_measured_in_a_webui():
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    row = status.measured("tiny-sd15", 64, 4, 1, 50, torch.device("cpu"))
    assert row["faults"] == []
    assert row["asked_per_s"] > 0
    assert row["ratio"]["median"] == pytest.approx(row["ms_a_step"]["asked"] / row["ms_a_step"]["quiet"])
