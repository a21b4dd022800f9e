"""Norms of two streams' heads, the concatenation of their tokens, and its rotation, as one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kitchen_operators import operators, table
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.kernels.transformers import torch_rms_norm, torch_rotary
from sfast_ext.kernels.pointwise import modulated_norm
from sfast_ext.kernels.pointwise import norm_rotary as kernel
from sfast_ext.passes.cleanup import cleanup
from sfast_ext.passes.joint_heads import joint_heads
from sfast_ext.passes.norm_rotary import norm_rotary, rotary
from sfast_ext.passes.rms_norm import rms_norm
from sfast_ext.passes.rotary_operators import rotary_operators

from .diffusion_transformers import HALF, available
from .support import Traced, randn

TEXT, IMAGE = randn(2, 5, 3, 16).to(HALF), randn(2, 12, 3, 16).to(HALF)
ANGLES = randn(1, 17, 1, 16), randn(1, 17, 1, 16)
ALL = (cleanup, rotary, rotary_operators, rms_norm, norm_rotary, joint_heads)


@pytest.fixture(autouse=True)
def supported(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch)


class Streams(nn.Module):
    """`body` of the normed heads of text and of an image."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(randn(16).to(HALF)) for _ in range(2))
        self.body, self.eps = body, 1e-6

    def forward(self, text: Tensor, image: Tensor, *angles: Tensor) -> Any:
        return self.body(torch_rms_norm(text, self.one, 1e-6), torch_rms_norm(image, self.two, self.eps), *angles)


def rotated(form: str, *, image_first: bool = False, heads_first: bool = False) -> Callable[..., Tensor]:
    def body(text: Tensor, image: Tensor, *angles: Tensor) -> Tensor:
        parts = [image, text] if image_first else [text, image]
        if heads_first:
            joint = torch.cat([part.transpose(1, 2) for part in parts], 2)
            return torch_rotary(joint, *(t.transpose(1, 2) for t in angles), form)
        return torch_rotary(torch.cat(parts, 1), *angles, form)

    return body


JOINED: dict[str, Callable[..., Any]] = {
    "text and image": rotated("neighbours"),
    "image and text": rotated("halves", image_first=True),
    "heads before tokens": rotated("neighbours", heads_first=True),
    "heads before tokens, image first": rotated("halves", image_first=True, heads_first=True),
    "without a rotation": lambda text, image, *angles: torch.cat([text, image], 1),
    "heads before tokens, without a rotation": lambda text, image, *angles: torch.cat(
        [text.transpose(1, 2), image.transpose(1, 2)], -2
    ),
    "one of two has heads before tokens": lambda text, image, *angles: torch.cat(
        [text, torch_rms_norm(image.transpose(1, 2).sin(), None, 1e-6).transpose(1, 2)], 1
    ),
    "the same tokens twice": lambda text, image, *angles: torch.cat([text, text], 1),
    "a rotation that is no rotation of tokens": lambda text, image, cos, sin: torch_rotary(
        torch.cat([text, text.cos()[:, :5]], 1), cos[:, :1], sin[:, :1], "halves"
    ),
}


@pytest.mark.parametrize("what", JOINED)
def test_tokens_are_written_next_to_each_other(what: str) -> None:
    traced = Traced(Streams(JOINED[what]), TEXT, IMAGE, *ANGLES)
    joined = what != "a rotation that is no rotation of tokens"
    assert traced.rewrite(*ALL) == joined
    assert bool(traced.find("cat")) != joined and traced.error() < 1e-2
    if joined:
        assert [len(launch.args) for launch in traced.launches(kernel)].count(8) == 1
        assert not traced.launches(modulated_norm)


@pytest.mark.parametrize("batch", [1, 3])
def test_parts_of_packed_products_in_float16(batch: int) -> None:
    def body(text: Tensor, image: Tensor) -> list[Tensor]:
        q, k, v = zip(*([part.unflatten(-1, (3, 16)) for part in x.sin().chunk(3, -1)] for x in (text, image)))
        joint = [torch.cat([torch_rms_norm(part, None, 1e-5) for part in parts], 1) for parts in (q, k)]
        return [*joint, torch.cat(v, 1)]

    traced = Traced(body, randn(batch, 5, 144).half(), randn(batch, 7, 144).half())
    assert traced.rewrite(*ALL) == 2 and len(traced.find("cat")) == 1
    assert traced.error() < 1e-2


class Forge(nn.Module):
    """Queries, keys and values of a block of Flux in Forge Neo."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self.norms = nn.ParameterList(nn.Parameter(randn(16).to(HALF)) for _ in range(4))
        self.operator = operator

    def forward(self, text: Tensor, image: Tensor, matrices: Tensor) -> Any:
        heads = []
        for packed, norms in ((text, self.norms[:2]), (image, self.norms[2:])):
            q, k, v = packed.sin().view(*packed.shape[:2], 3, 3, -1).permute(2, 0, 3, 1, 4)
            heads.append([*(torch_rms_norm(x, w, 1e-6).to(v) for x, w in zip((q, k), norms)), v])
        q, k, v = (torch.cat(parts, dim=2) for parts in zip(*heads))
        q, k = getattr(operators(), self.operator)(q, k, matrices)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("operator", ["apply_rope", "apply_rope_split_half"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_block_of_forge_neo(operator: str, batch: int) -> None:
    given = [randn(batch, count, 3 * 3 * 16).to(HALF) for count in (5, 12)]
    traced = Traced(Forge(operator), *given, table(1, 1, 17, columns=16))
    assert traced.rewrite(*ALL) == 3 and not traced.find("cat")
    assert sorted(launch.args[5][:8] for launch in traced.launches(kernel)) == ["matrices", "matrices", "none"]
    assert traced.error() < 1e-2


def attended(join: Callable[..., Tensor]) -> Callable[..., Any]:
    """An attention whose values are what `join` makes of packed products of text and image."""

    def body(text: Tensor, image: Tensor) -> Any:
        packed = [x.sin().unflatten(-1, (3, 3, 16)) for x in (text, image)]
        q, k = (torch.cat([x[:, :, i] for x in packed], 1).transpose(1, 2).cos() for i in range(2))
        return F.scaled_dot_product_attention(q, k, join(*packed)).transpose(1, 2).flatten(2)

    return body


def heads_first(*parts: Tensor) -> Tensor:
    return torch.cat([part.transpose(1, 2) for part in parts], 2)


VALUES: dict[str, tuple[Callable[..., Any], int]] = {
    "tokens before heads": (attended(lambda x, y: torch.cat([x[:, :, 2], y[:, :, 2]], 1).transpose(1, 2)), 1),
    "heads before tokens": (attended(lambda x, y: heads_first(x[:, :, 2], y[:, :, 2])), 1),
    "image and text": (attended(lambda x, y: heads_first(y[:, :, 1], x[:, :, 2])), 1),
    "what is no part of a product": (attended(lambda x, y: heads_first(x[:, :, 2].cos(), y[:, :, 2])), 0),
    "three": (attended(lambda x, y: heads_first(x[:, :, 2], y[:, :6, 2], y[:, 6:, 2])), 0),
    "values that others read": (attended(lambda x, y: (v := heads_first(x[:, :, 2], y[:, :, 2])) + v.sin()), 0),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("what", VALUES)
def test_values_of_packed_products(what: str, dtype: torch.dtype) -> None:
    body, count = VALUES[what]
    traced = Traced(body, randn(2, 5, 144).to(dtype), randn(2, 7, 144).to(dtype))
    assert traced.rewrite(*ALL) == count * (dtype == HALF) and traced.error() < 1e-2
    # queries and keys are not read as they are joined
    assert len(traced.find("cat")) == (2 if count and dtype == HALF else 3)


def several(text: Tensor, image: Tensor, *angles: Tensor) -> Any:
    joint = torch.cat([text, image], 1)
    return torch_rotary(joint, *angles, "halves"), joint


def written(text: Tensor, image: Tensor, *angles: Tensor) -> Any:
    joint = torch.cat([text, image], 1)
    joint[:, 0] = 1
    return torch_rotary(joint, *angles, "halves")


STAYS: dict[str, Callable[..., Any]] = {
    "a norm that others read": lambda text, image, *angles: (torch.cat([text, image], 1), text.sin()),
    "three streams": lambda text, image, *angles: torch.cat([text, image, text], 1),
    "heads of two streams": lambda text, image, *angles: torch.cat([text, image[:, :5]], 2),
    "columns": lambda text, image, *angles: torch.cat([text, text], 3),
    "images": lambda text, image, *angles: torch.cat([image, image], 0),
    "a stream without a norm": lambda text, image, *angles: torch.cat([text, image.sin()], 1),
    "a part of a norm": lambda text, image, *angles: torch.cat([text, image[:, 1:]], 1),
    "one value": lambda text, image, *angles: torch.cat([image], 1),
    "what is written to": written,
}


@pytest.mark.parametrize("what", STAYS)
def test_others_stay(what: str) -> None:
    traced = Traced(Streams(STAYS[what]), TEXT, IMAGE, *ANGLES)
    assert traced.rewrite(*ALL) == 0
    assert traced.find("cat") and traced.error() < 1e-2


def test_the_joint_heads_are_read_twice() -> None:
    """The norms are joined, the rotation is one more kernel."""
    traced = Traced(Streams(several), TEXT, IMAGE, *ANGLES)
    assert traced.rewrite(*ALL) == 1 and not traced.find("cat") and len(traced.launches(kernel)) == 2
    assert traced.error() < 1e-2


@pytest.mark.parametrize("heads_first", [False, True])
def test_a_rotation_of_heads_is_none_of_tokens(heads_first: bool) -> None:
    """Heads are joined, which have angles of their tokens."""

    def body(one: Tensor, two: Tensor, *angles: Tensor) -> Tensor:
        if heads_first:
            return torch_rotary(torch.cat([one, two], 1), *(t.transpose(1, 2) for t in angles), "halves")
        return torch_rotary(torch.cat([one, two], 2), *angles, "halves")

    shape = (2, 5, 7, 16) if heads_first else (2, 7, 5, 16)
    traced = Traced(Streams(body), *(randn(*shape).to(HALF) for _ in range(2)), *(angle[:, :7] for angle in ANGLES))
    assert traced.rewrite(*ALL) == 1 and [len(node.args) for node in traced.launches(kernel)] == [8, 6]
    assert traced.error() < 1e-2


def test_norms_of_two_epsilons_stay() -> None:
    module = Streams(JOINED["text and image"])
    module.eps = 1e-5
    traced = Traced(module, TEXT, IMAGE, *ANGLES)
    assert traced.rewrite(*ALL) == 0 and len(traced.find("cat")) == 1
    assert traced.error() < 1e-2
