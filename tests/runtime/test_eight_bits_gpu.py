"""Plans with 8-bit integers by their kernels, on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import eight_bit_kernels
import pytest
import torch

from benchmarks import eight_bits as benchmark
from sfast_ext import Accelerator, Config, accelerate
from sfast_ext.call_signature import flatten_output
from sfast_ext.runtime import eight_bits
from sfast_ext.runtime.verify import relative_error
from sfast_ext.tools.lib import models

pytestmark = pytest.mark.gpu
CONFIG = Config(eight_bits=True, drop_slower=False)


class Pair:
    """A UNet of SD 1.5's size under an accelerator, and its twin."""

    def __init__(self, config: Config = CONFIG) -> None:
        self.twin: Any = models.random_unet("sd15", dtype=torch.float16, device="cuda")
        self.ours: Any = copy.deepcopy(self.twin)
        self.acc: Accelerator = accelerate(self.ours, config)
        self.seed = 0

    def results(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        self.seed += 1
        args, kwargs = models.unet_inputs(self.ours, 512, 512, seed=self.seed)
        return flatten_output(self.ours(*args, **kwargs))[1], flatten_output(self.twin(*args, **kwargs))[1]

    def error(self) -> float:
        return relative_error(*self.results())


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    # all layers, whatever is faster on this card
    eight_bit_kernels.pay_everywhere(monkeypatch)
    device = torch.device("cuda", torch.cuda.current_device())
    if eight_bits.unsupported(device, {torch.float16}) is not None:
        pytest.skip("this GPU has no products of 8-bit integers")
    with torch.no_grad():
        found = Pair()
        yield found
        found.acc.release()


def test_a_unet_in_8_bits(pair: Pair) -> None:
    pair.error()
    assert all(pair.error() < 0.04 for _ in range(3))
    told = pair.acc.status()["eight_bits"]
    assert told["layers"] > 40 and told["reason"] is None and told["bytes"] > 100 << 20
    assert pair.acc.report.counter("errors") == 0 and pair.acc.report.counter("replays") == 3


def test_weights_that_change_at_each_step_are_followed_by_the_graph(pair: Pair) -> None:
    pair.error()
    before = pair.error()
    for step in range(4):
        for unet in (pair.ours, pair.twin):
            for name, parameter in unet.named_parameters():
                if "transformer_blocks" in name and parameter.dim() == 2:
                    parameter[step::3] *= -0.5
        assert pair.error() < 2 * before
    assert pair.acc.report.counter("captures") == 1


def test_off_gives_the_exact_bits_again(pair: Pair) -> None:
    exact = Config(drop_slower=False)
    args, kwargs = models.unet_inputs(pair.ours, 512, 512)
    found = {}
    for config in (exact, CONFIG, exact, CONFIG):
        pair.acc.configure(config)
        pair.ours(*args, **kwargs)
        result = flatten_output(pair.ours(*args, **kwargs))[1][0]
        assert torch.equal(found.setdefault(config.eight_bits, result), result)
    assert not torch.equal(found[True], found[False])


def test_memory_goes_and_comes_back(pair: Pair) -> None:
    for _ in range(2):
        pair.error()
    pair.ours.to("cpu")
    assert pair.acc.give_memory_back()
    assert pair.acc.status()["eight_bits"]["bytes"] == 0
    pair.ours.to("cuda")
    assert all(pair.error() < 0.04 for _ in range(3))
    assert pair.acc.status()["eight_bits"]["bytes"] > 0


def test_a_first_call_takes_no_second_more(pair: Pair) -> None:
    ways = (benchmark.WAYS["exact"], CONFIG)
    for _ in range(2):
        # the second time everything is compiled
        exact, chosen = (benchmark.way(pair.twin, config, 512, 1)["first_call_s"] for config in ways)
    assert chosen < exact + 1
