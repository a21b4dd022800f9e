"""Text encoders on a GPU, in half precision: by CUDA graphs, moved and back, against a twin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from hosts.standins import text_encoders as standin
from sfast_ext.hooks import Hooks
from sfast_ext.hosts.text_encoders import TextEncoders
from sfast_ext.report import Report
from sfast_ext.runtime import plan_runner
from sfast_ext.tools.lib import models
from sfast_ext.ui.settings_table import HostConfig

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("text_plans_at_once")]
KINDS = ("CLIP-L", "FrozenOpenCLIPEmbedder", "FrozenOpenCLIPEmbedder2", "transformers")


def make(kind: str) -> Any:
    if kind == "transformers":
        from transformers import CLIPTextConfig, CLIPTextModelWithProjection

        config = CLIPTextConfig(
            vocab_size=standin.WORDS, hidden_size=128, intermediate_size=512, num_hidden_layers=4,
            num_attention_heads=2, projection_dim=128, bos_token_id=0, eos_token_id=standin.END,
        )  # fmt: skip
        embedder: Any = models.randomise(CLIPTextModelWithProjection(config), 1).eval().requires_grad_(False)
        return embedder.half().cuda()
    sizes = {"width": 128, "layers": 4, "heads": 2}
    embedder = standin.clip_l(1, True, **sizes) if kind == "CLIP-L" else standin.open_clip(1, kind, True, **sizes)
    return embedder.half().cuda()


@torch.no_grad()
def read(embedder: Any, tokens: torch.Tensor, fixes: Any = None) -> list[torch.Tensor]:
    if hasattr(embedder, "text_model"):
        found = embedder(tokens, output_hidden_states=True)
        return [found.text_embeds, found.last_hidden_state, *found.hidden_states]
    return standin.read(embedder, tokens, fixes=fixes)


@pytest.fixture(autouse=True)
def other_work_on_the_gpu_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    # a plan is timed by one run of a millisecond, and other tests have the GPU for several at a time
    monkeypatch.setattr(plan_runner, "too_slow", lambda *_: None)


@pytest.fixture(params=KINDS)
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any, TextEncoders, Report]]:
    report = Report()
    with standin.packages():
        encoders = TextEncoders(lambda module: Hooks(), report)
        yield make(request.param), make(request.param), encoders, report
        encoders.release()
    assert report.as_dict()["last_error"] is None


def compared(both: Any, tokens: torch.Tensor, fixes: Any = None) -> None:
    made, twin, encoders, _ = both
    encoders.follow([made], HostConfig())
    found, expected = read(made, tokens, fixes), read(twin, tokens, fixes)
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert float((one.float() - other.float()).norm() / other.float().norm()) < 4e-3


def test_a_cuda_graph_reads_prompts_chunks_and_vectors(both):
    for rows in (1, 2, 8):
        for seed in range(6):
            compared(both, standin.ids(seed, rows).cuda())
    if not hasattr(both[0], "text_model"):
        vectors = [[(3, torch.randn(5, 128, device="cuda", dtype=torch.float16))]]
        compared(both, standin.ids(1).cuda(), vectors)
    report = both[3]
    assert report.counter("text_replays") > 6, report.as_dict()["events"]
    assert report.counter("text_captures") == 3


def test_weights_that_change_and_go_and_come_back(both):
    made, twin, encoders, report = both
    for seed in range(4):
        compared(both, standin.ids(seed).cuda())
    before = report.counter("text_replays") + report.counter("text_eager_runs")
    for model in (made, twin):
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)][3]
        linear.weight.data.mul_(1.3)
    compared(both, standin.ids(5).cuda())
    for model in (made, twin):
        model.cpu()
    for accelerator in encoders.attachments[0].accelerators():
        accelerator.give_memory_back()
    for model in (made, twin):
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)][4]
        linear.weight.data.mul_(-1)
        model.cuda()
    for seed in range(3):
        compared(both, standin.ids(seed).cuda())
    ran = report.counter("text_replays") + report.counter("text_eager_runs")
    assert ran >= before + 3, (before, report.as_dict())
    assert report.counter("text_captures") == 1
