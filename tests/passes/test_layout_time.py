from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfast_ext.passes import layout_time
from sfast_ext.passes.channels_last import channels_last
from sfast_ext.passes.layout_time import Operation, channels_last_pays, operations, runner

from .support import Traced, randn

X = randn(2, 8, 6, 5)
LAYOUTS = (torch.contiguous_format, torch.channels_last)


class Block(nn.Module):
    """All that depends on the layout of images, and something that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.wide = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 8, 3, stride=2, padding=1, bias=False)
        self.point, self.norm, self.proj = nn.Conv2d(8, 8, 1), nn.GroupNorm(4, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm(self.conv(x))) + self.conv(x)
        n, c, h, w = x.shape
        tokens = self.point(x).permute(0, 2, 3, 1).reshape(n, h * w, c)
        x = self.proj(tokens).reshape(n, h, w, c).permute(0, 3, 1, 2) + x
        return F.interpolate(self.wide(torch.cat([x, x], 1)), scale_factor=2.0, mode="nearest")


def test_what_depends_on_the_layout_is_found_and_counted() -> None:
    traced = Traced(Block(), X)
    found = operations(traced.graph)
    image, wide = (2, 8, 6, 5), (2, 16, 6, 5)
    told = Counter({(operation.kind, operation.shapes): count for operation, count in found.items()})
    assert told == {
        ("convolution", (image, (8, 8, 3, 3))): 2,
        ("convolution", (wide, (8, 16, 3, 3))): 1,
        ("pointwise", (image, (8, 8, 1, 1))): 1,
        ("norm", (image,)): 1,
        ("move", (image,)): 2,
        ("cat", (image, image)): 1,
        ("upsample", ((2, 8, 3, 3), (2, 8, 6, 6))): 1,
    }
    assert {operation.dtype for operation in found} == {torch.float32}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_operation_is_what_the_graph_does(layout: torch.memory_format) -> None:
    found = operations(Traced(Block(), X).graph)
    random = torch.get_rng_state()
    for operation in found:
        run = runner(operation, torch.device("cpu"), layout)
        if operation.kind == "move" and layout == torch.channels_last:
            assert run is None
            continue
        assert run is not None
        out = run()
        assert out.isfinite().all() and run().shape == out.shape
        if operation.kind in ("convolution", "norm", "cat", "upsample"):
            assert out.is_contiguous(memory_format=layout) or min(out.shape[1:]) == 1
    # which is the host's
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(("times", "pays"), [((2.0, 1.0), True), ((1.0, 2.0), False), ((1.0, 1.0), False)])
def test_the_quicker_layout_is_chosen(times, pays, monkeypatch) -> None:
    by_layout = dict(zip(LAYOUTS, times))
    monkeypatch.setattr(layout_time, "milliseconds", lambda found, device, layout: by_layout[layout])
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    assert channels_last_pays(Traced(Block(), X).graph, torch.device("cuda", 0)) == pays


def test_images_stay_as_they_lie_if_it_does_not_pay() -> None:
    traced = Traced(Block(), X)
    traced.ctx.channels_last = False
    assert traced.rewrite(channels_last) == 0
    assert traced.ops()["contiguous"] == 0 and traced.ops()["conv2d"] == 4
    assert all(p.is_contiguous() for p in traced.arena.root.parameters())


@pytest.mark.gpu
def test_the_time_of_a_layout_is_the_gpus() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    small = Operation("convolution", ((2, 64, 32, 32), (64, 64, 3, 3)), (True, 1, 1, 1, 1), torch.float16)
    large = small._replace(shapes=((2, 64, 256, 256), (64, 64, 3, 3)))
    for layout in LAYOUTS:
        times = [layout_time.milliseconds(Counter({o: 1}), device, layout) for o in (small, large, large)]
        assert 0 < times[0] < times[1]
        assert layout_time.milliseconds(Counter({large: 10}), device, layout) > 3 * times[2]
