"""InstantID in SD.Next: processors of its own that are modules, with a face's tokens behind the prompt's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hosts.standins.sdnext import Host, close, hosted, pipeline

TOKENS = 2


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    yield from hosted(monkeypatch)


class FaceProcessor(nn.Module):
    """As SD.Next's modules/face/instantid_model.py has it, where the last tokens are a face's."""

    def __init__(self, width: int, context: int, scale: float) -> None:
        super().__init__()
        self.scale, self.num_tokens = scale, TOKENS
        self.to_k_ip, self.to_v_ip = (nn.Linear(context, width, bias=False) for _ in range(2))

    def __call__(self, attn: Any, x: Any, encoder_hidden_states: Any, *_: Any, **__: Any) -> Any:
        end = encoder_hidden_states.shape[1] - self.num_tokens
        words, face = encoder_hidden_states[:, :end, :], encoder_hidden_states[:, end:, :]
        query = attn.head_to_batch_dim(attn.to_q(x))

        def seen(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            weights = attn.get_attention_scores(query, attn.head_to_batch_dim(keys), None)
            return attn.batch_to_head_dim(torch.bmm(weights, attn.head_to_batch_dim(values)))

        y = seen(attn.to_k(words), attn.to_v(words)) + self.scale * seen(self.to_k_ip(face), self.to_v_ip(face))
        return attn.to_out[1](attn.to_out[0](y)) / attn.rescale_output_factor


def with_faces(unet: Any, scale: float) -> None:
    torch.manual_seed(7)
    processors = {}
    for name, processor in unet.attn_processors.items():
        attn = unet.get_submodule(name.removesuffix(".processor"))
        wide = attn.to_q.in_features
        processors[name] = processor if name.endswith("attn1.processor") else FaceProcessor(wide, 16, scale)
    unet.set_attn_processor(processors)


def stock(host: Host, scale: float | None) -> torch.Tensor:
    """The image of an untouched model."""
    other = pipeline(0)
    if scale is not None:
        with_faces(other.unet, scale)
    loaded, host.modeldata.model_data.sd_model = host.modeldata.model_data.sd_model, other
    try:
        return host.stock()
    finally:
        host.modeldata.model_data.sd_model = loaded


def test_a_face_is_never_baked_in(host: Host) -> None:
    pipe = pipeline(0)
    host.sd_models.load_model(pipe)
    before = dict(pipe.unet.attn_processors)
    plain = stock(host, None)
    close(host.image(), plain)
    for scale in (0.8, 0.8, 0.3, 0.0):
        if scale == 0.8:
            with_faces(pipe.unet, scale)
        else:
            for processor in pipe.unet.attn_processors.values():
                if isinstance(processor, FaceProcessor):
                    processor.scale = scale
        expected, runs = stock(host, scale), host.runs()
        assert (expected - plain).abs().max() > 1e-3
        close(host.image(), expected)
        close(host.image(), expected)
        assert host.runs() > runs
    assert not host.reasons()
    pipe.unet.set_attn_processor(before)
    runs = host.runs()
    close(host.image(), plain)
    assert host.runs() > runs
