"""Results are such tensors as those of the original: inference tensors or not, and in its memory format."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sfast_ext import Config, accelerate

MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(F.silu(self.norm(self.first(x))))


class Elementwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x):
        return {"sample": x * self.scale + 1, "flat": (x - self.scale).flatten(2)}


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        return y, y.transpose(1, 2), [y.view(x.shape[0], -1)]


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(4, 4, 3, padding=1)

    def forward(self, x):
        return F.silu(self.conv(x.unsqueeze(2).repeat(1, 1, 2, 1, 1))).mean(2)


class WithItsOwn(nn.Module):
    """Returns a buffer and a view of a weight as well: memory that a caller may write to in any mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("steps", torch.arange(3.0))

    def forward(self, x):
        return self.linear(x), self.steps, self.linear.bias[1:]


class GivesBack(nn.Module):
    """Returns its input as well."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.conv(x), x


MODELS = [Convolutions, Elementwise, Rows, Stacked, WithItsOwn, GivesBack]


def pair(kind):
    torch.manual_seed(0)
    ours, twin = kind().eval().requires_grad_(False), kind().eval().requires_grad_(False)
    twin.load_state_dict(ours.state_dict())
    return ours, accelerate(ours, Config(allow_cpu=True, drop_slower=False)), twin


def tensors(result):
    if isinstance(result, torch.Tensor):
        return [result]
    return [x for each in (result.values() if isinstance(result, dict) else result) for x in tensors(each)]


def latent(seed=0):
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(seed))


def written(x):
    """What a caller can do with a result afterwards: write to it, and let autograd save it."""
    done = []
    uses = (lambda: x.add_(0), lambda: x._version, lambda: (x * torch.ones(1, requires_grad=True)).sum().backward())
    for use in uses:
        try:
            use()
            done.append(None)
        except RuntimeError as exc:
            done.append(str(exc))
    return done


@pytest.mark.parametrize("order", itertools.product(MODES, repeat=3), ids="-".join)
@pytest.mark.parametrize("kind", MODELS)
def test_results_are_inference_tensors_if_those_of_the_original_are(kind, order):
    ours, accelerator, twin = pair(kind)
    # the first two calls make a plan and use it
    for step, mode in enumerate((*order[:1], *order)):
        with MODES[mode]():
            # an ordinary tensor: it is what a result may be
            with torch.inference_mode(False):
                x = latent(step)
            found, wanted = tensors(ours(x)), tensors(twin(x))
        assert [y.is_inference() for y in found] == [y.is_inference() for y in wanted]
        assert all(torch.allclose(y, z, atol=1e-5) for y, z in zip(found, wanted))
        for y, z in zip(found, wanted):
            assert written(y) == written(z)
    assert accelerator.report.counter("captures") == 1 and accelerator.report.counter("eager_runs") == 3


@pytest.mark.parametrize("mode", MODES)
def test_inputs_that_are_inference_tensors(mode):
    ours, accelerator, twin = pair(Convolutions)
    for step in range(3):
        with torch.inference_mode():
            x = latent(step)
        with MODES[mode]():
            found, wanted = ours(x), twin(x)
        assert found.is_inference() == wanted.is_inference() and torch.allclose(found, wanted, atol=1e-5)
    assert accelerator.report.counter("eager_runs") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("order", itertools.product(MODES, repeat=2), ids="-".join)
def test_results_of_a_cuda_graph(order):
    torch.manual_seed(0)
    ours, twin = (WithItsOwn().cuda().half().eval().requires_grad_(False) for _ in range(2))
    twin.load_state_dict(ours.state_dict())
    accelerator = accelerate(ours, Config(drop_slower=False))
    for step, mode in enumerate((*order[:1], *order, *order)):
        x = latent(step).cuda().half()
        with MODES[mode]():
            found, wanted = ours(x), twin(x)
        assert [y.is_inference() for y in found] == [y.is_inference() for y in wanted]
        for y, z in zip(found, wanted):
            assert torch.allclose(y, z, atol=1e-2) and written(y) == written(z)
    assert accelerator.report.counter("replays") == 4


def permuted(x, dims):
    back = [dims.index(d) for d in range(4)]
    return x.permute(dims).contiguous().permute(back)


FORMATS = {
    "contiguous": lambda x: x,
    "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "rows and columns exchanged": lambda x: permuted(x, [0, 1, 3, 2]),
    "batch after channels": lambda x: permuted(x, [1, 0, 2, 3]),
    "batch last": lambda x: permuted(x, [1, 2, 3, 0]),
    "all reversed": lambda x: permuted(x, [3, 2, 1, 0]),
    "rows first": lambda x: permuted(x, [2, 0, 1, 3]),
    "channels-last, of more channels": lambda x: FORMATS["channels-last"](torch.cat([x, x], 1))[:, :4],
    "some of the columns, channels-last": lambda x: FORMATS["channels-last"](torch.cat([x, x], 3))[..., ::2],
    "of more channels": lambda x: torch.cat([x, x], 1)[:, :4],
    "every second column": lambda x: torch.cat([x, x], 3)[..., ::2],
    "one image for all": lambda x: x[:1].expand(2, -1, -1, -1),
}
SAME_PLAN = ["contiguous", "of more channels", "every second column", "one image for all"]


@pytest.mark.thinned
@pytest.mark.parametrize("first", ["contiguous", "channels-last", "of more channels"])
@pytest.mark.parametrize("given", FORMATS)
@pytest.mark.parametrize("kind", [Convolutions, Elementwise, Rows, Stacked])
@torch.no_grad()
def test_results_have_the_strides_of_the_original(kind, given, first):
    ours, accelerator, twin = pair(kind)
    for step, each in enumerate((first, first, given, given, first)):
        x = FORMATS[each](latent(step))
        found, wanted = tensors(ours(x)), tensors(twin(x))
        assert [y.stride() for y in found] == [y.stride() for y in wanted]
        assert all(torch.allclose(y, z, atol=1e-5) for y, z in zip(found, wanted))
    assert accelerator.report.counter("eager_runs") >= 3


@pytest.mark.parametrize("given", ["channels-last", "all reversed"])
@torch.no_grad()
def test_an_input_that_is_returned_has_its_own_strides(given):
    ours, accelerator, twin = pair(GivesBack)
    for step, each in enumerate(["contiguous", given] * 3):
        x = FORMATS[each](latent(step))
        assert [y.stride() for y in ours(x)] == [y.stride() for y in twin(x)]
    assert accelerator.report.counter("captures") == 2


@torch.no_grad()
def test_an_input_with_gaps_that_is_returned_leaves_none_in_later_results():
    ours, accelerator, twin = pair(GivesBack)
    for step, each in enumerate(["of more channels", "contiguous", "contiguous"]):
        x = FORMATS[each](latent(step))
        assert [y.stride() for y in ours(x)] == [y.stride() for y in twin(x)]
    assert accelerator.report.counter("captures") == 1


@torch.no_grad()
def test_gaps_between_elements_bring_no_plan():
    ours, accelerator, _ = pair(Elementwise)
    for step, each in enumerate(SAME_PLAN * 2):
        ours(FORMATS[each](latent(step)))
    assert accelerator.report.counter("captures") == 1 and accelerator.report.counter("eager_runs") == 7


@torch.no_grad()
def test_the_report_tells_plans_of_two_memory_formats_apart():
    ours, accelerator, _ = pair(Convolutions)
    for each in ("contiguous", "channels-last"):
        ours(FORMATS[each](latent()))
    assert [plan.label for plan in accelerator.plans.values()] == [
        "#0 f32[2,4,6,6]", "#0 f32[2,4,6,6] in the order 0,2,3,1",
    ]  # fmt: skip
