"""Values that a forward reads and that follow from arguments: lengths of a mask. They are computed for the recorded
call, and no other call gets its plan."""

from __future__ import annotations

import pytest
import torch
from small_net import CPU, close, counters, no_gradients  # noqa: F401
from torch import nn

from sfast_ext import accelerate
from sfast_ext.argument_contents import MAX_VALUES
from sfast_ext.argument_roles import ArgumentRoles
from sfast_ext.call_signature import NotOurs, flatten_call
from sfast_ext.capture import fake_trace
from sfast_ext.capture.known_values import ReadsArguments

MASKS = [
    torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]]),
    torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]]),
    torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1]]),
]


def lengths(mask):
    return mask.sum(dim=1).tolist()


def longest(mask):
    return [mask.sum(dim=1).max().item()] * 2


def as_bool(mask):
    return [2 if (mask[0] == mask[1]).all() else 3] * 2


def as_index(mask):
    return [len(range(mask[0].sum())), len(range(mask[1].sum()))]


def after_a_write(mask):
    counts = torch.zeros(2, dtype=torch.int32)
    for row in range(2):
        counts[row] = mask[row].sum() + 1
    counts += 1
    return (counts - 1).tolist()


def of_a_view_that_is_written(mask):
    counts = mask.sum(dim=1)
    row = counts[0:1]
    row.fill_(1)
    return counts.tolist()


def of_floats(mask):
    return [int(float(mask.float().mean()) * 4)] * 2


def with_literal(mask):
    return (mask.sum(dim=1) * torch.tensor([1, 0])).tolist()


def of_a_cast(mask):
    return [int(mask.bool().any(dim=1)[0]), int(mask.to(torch.int16).argmin(dim=1)[1])]


def of_a_truth(mask):
    return [1 if mask[0, 3] else 2, 3 if not mask[1, 3] else 4]


READS = [
    lengths, longest, as_bool, as_index, after_a_write, of_a_view_that_is_written, of_floats, with_literal, of_a_cast,
    of_a_truth,
]  # fmt: skip


class Net(nn.Module):
    def __init__(self, read) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read

    def forward(self, x, mask, other=None):
        h = self.layer(x) * mask.unsqueeze(-1)
        return torch.cat([h[row, :n] for row, n in enumerate(self.read(mask))])


def made(read, kind=Net):
    torch.manual_seed(0)
    net = kind(read).eval().requires_grad_(False)
    return net, net.forward, accelerate(net, CPU)


@pytest.mark.thinned("read", "dtype")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.uint8])
@pytest.mark.parametrize("read", READS)
def test_each_content_has_a_plan(read, dtype):
    net, original, accelerator = made(read)
    for mask in (*MASKS, *MASKS[::-1]):
        for _ in range(12 if mask is MASKS[0] else 3):
            x, mask = torch.randn(2, 4, 4), mask.to(dtype)
            close(net(x, mask), original(x, mask))
    found = counters(accelerator)
    assert found["captures"] == 3 and found["eager_runs"] >= 25, accelerator.report.as_dict()["reasons"]


@pytest.mark.parametrize("read", [lengths, longest, of_floats])
def test_a_mask_that_is_written_in_place_is_read_anew(read):
    net, original, _ = made(read)
    mask = MASKS[0].clone()
    for other in (*MASKS, *MASKS):
        with torch.inference_mode():
            mask.copy_(other)
        for _ in range(3):
            x = torch.randn(2, 4, 4)
            close(net(x, mask), original(x, mask))


def test_other_sizes_need_no_second_attempt():
    net, original, accelerator = made(lengths)
    for n in (4, 5, 6):
        mask = torch.ones(2, n, dtype=torch.int64)
        mask[0, 2:] = 0
        for _ in range(3):
            x = torch.randn(2, n, 4)
            close(net(x, mask), original(x, mask))
    events = [each["message"] for each in accelerator.report.as_dict()["events"]]
    assert sum("content of arguments" in message for message in events) == 1
    assert counters(accelerator)["captures"] == 3


def test_a_mask_that_is_only_computed_with_is_no_part_of_the_signature():
    net, original, accelerator = made(lambda mask: [2, 3])
    for mask in MASKS:
        x = torch.randn(2, 4, 4)
        close(net(x, mask), original(x, mask))
    assert counters(accelerator)["captures"] == 1


def weights_too(self, mask):
    return [int((mask[row] * self.layer.weight[0] * 0 + 1).sum()) for row in range(2)]


class OfWeights(Net):
    def forward(self, x, mask, other=None):
        n = int((mask[0] * (self.layer.weight[0] > 0)).sum()) + 1
        return self.layer(x)[:, :n]


class OfInput(Net):
    def forward(self, x, mask, other=None):
        return self.layer(x) * (2.0 if x.mean() > 0 else 3.0) * mask.unsqueeze(-1)


class Drawn(Net):
    def forward(self, x, mask, other=None):
        n = int(mask.sum() * 0 + torch.randint(1, 4, (1,))[0])
        return self.layer(x)[:, :n]


class WrittenByAnInput(Net):
    def forward(self, x, mask, other=None):
        counts = torch.zeros(2, dtype=torch.int64)
        counts.copy_((x[:, 0, 0] > 0).long() + mask.sum(1) * 0)
        return self.layer(x)[:, : int(counts.max()) + 1]


class WrittenThroughAView(Net):
    def forward(self, x, mask, other=None):
        counts = torch.zeros(2, dtype=torch.int64)
        counts[0:1].copy_((x[:1, 0, 0] > 0).long() + mask.sum() * 0)
        return self.layer(x)[:, : int(counts.max()) + 1]


@pytest.mark.parametrize("kind", [OfWeights, OfInput, Drawn, WrittenByAnInput, WrittenThroughAView])
def test_what_follows_from_more_is_bypassed_with_a_reason(kind):
    net, original, accelerator = made(None, kind)
    for seed in range(5):
        x = torch.randn(2, 4, 4)
        torch.manual_seed(seed)
        expected = original(x, MASKS[0])
        torch.manual_seed(seed)
        assert torch.equal(net(x, MASKS[0]), expected)
    assert "captures" not in counters(accelerator)
    (reason, *_) = accelerator.report.as_dict()["reasons"]
    assert "reads a value" in str(reason) or "random" in str(reason) or "draws" in str(reason)


class OfTimestep(Net):
    def forward(self, x, mask, other=None):
        return self.layer(x) * (2.0 if mask.item() > 500 else 3.0)


def test_a_number_that_changes_at_each_call_makes_no_plans():
    net, original, accelerator = made(None, OfTimestep)
    for step in (999, 749, 499, 249, 1):
        x = torch.randn(2, 4, 4)
        close(net(x, torch.tensor(step)), original(x, torch.tensor(step)))
    assert "captures" not in counters(accelerator)
    (reason,) = accelerator.report.as_dict()["reasons"]
    assert "reads a value" in str(reason)


def test_a_number_that_stays_is_part_of_the_signature():
    net, original, accelerator = made(None, OfTimestep)
    for step in (999, 999, 999, 999, 100, 100, 100):
        x = torch.randn(2, 4, 4)
        close(net(x, torch.tensor(step)), original(x, torch.tensor(step)))
    assert counters(accelerator)["captures"] == 2


def test_what_changes_at_every_call_ends_with_the_name_of_the_argument():
    net, original, accelerator = made(lengths)
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        mask = torch.randint(0, 2, (2, 4), generator=generator)
        x = torch.randn(2, 4, 4)
        close(net(x, mask), original(x, mask))
    assert counters(accelerator)["captures"] <= 4
    assert any("content of argument 1" in str(reason) for reason in accelerator.report.as_dict()["reasons"])


def test_large_masks_and_floats_are_no_part_of_a_signature():
    device, roles = torch.device("cpu"), ArgumentRoles()
    for leaf in (torch.ones(2, MAX_VALUES, dtype=torch.int64), torch.ones(2, 2), torch.ones(2, 2).cfloat()):
        assert roles.read_values(flatten_call((leaf,), {}, device), frozenset({0})) is False
    assert not roles.known
    call = flatten_call((torch.ones(2, 2).bool(),), {}, device)
    assert roles.read_values(call, frozenset({0})) is True
    assert roles.flatten(call, (), {}, device).signature.contents == ((0, (True,) * 4),)


def test_arguments_are_told_by_their_places():
    def forward(a, b, c):
        return [c[:, : int(b.sum())] + a]

    inputs = torch.ones(1), torch.ones(1, 2, dtype=torch.int64), torch.ones(2, 5)
    with torch.no_grad(), pytest.raises(ReadsArguments) as raised:
        fake_trace.record(forward, inputs, known=frozenset())
    assert raised.value.arguments == {1}
    with torch.no_grad():
        graph = fake_trace.record(forward, inputs, known=frozenset({1}))
        assert graph(*inputs)[0].shape == (2, 2)
        with pytest.raises(NotOurs):
            fake_trace.record(lambda a, b, c: [c[:, : int(b.sum() + a.sum())]], inputs, known=frozenset({1}))
