"""What other threads see of a module while a capture records it."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sfast_ext import Config, accelerate
from sfast_ext.capture.fake_trace import record


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = F.silu(layer(x)) + x
        return x


class Net(nn.Module):
    """Equal blocks, which are recorded once, and a step at which another thread gets its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = self.conv(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
            if TURN is not None:
                TURN()
        return x


TURN = None
X = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(1))


def made() -> Net:
    torch.manual_seed(0)
    return Net().eval().requires_grad_(False)


def saved(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def attributes(net):
    return [(path, sorted(vars(m)), [type(v) for v in vars(m).values()]) for path, m in net.named_modules()]


def called(net):
    with torch.no_grad():
        return [net(X)]


DEEDS = {
    "deepcopy": lambda net: list(copy.deepcopy(net).state_dict().values()),
    "a deep copy runs": lambda net: called(copy.deepcopy(net)),
    "pickle": lambda net: list(pickle.loads(pickle.dumps(net)).state_dict().values()),
    "a pickled one runs": lambda net: called(pickle.loads(pickle.dumps(net))),
    "torch.save": lambda net: list(saved(net).state_dict().values()),
    "a saved one runs": lambda net: called(saved(net)),
    "a block": lambda net: list(copy.deepcopy(net.blocks[1]).state_dict().values()),
    "a block runs": lambda net: [copy.deepcopy(net.blocks[1])(torch.ones(1, 16, 8))],
    "a shallow copy runs": lambda net: [copy.copy(net.blocks[2])(torch.ones(1, 16, 8))],
    "the block itself runs": lambda net: [net.blocks[3](torch.ones(1, 16, 8))],
    "state_dict": lambda net: list(net.state_dict().values()),
    "names": lambda net: [torch.tensor(len(list(net.named_modules())))],
    "repr": lambda net: [torch.tensor(len(repr(net)))],
    "attributes": lambda net: [torch.tensor(len(str(attributes(net.blocks))))],
    "the whole runs": called,
}


def in_another_thread(deed, net):
    found = []

    def run():
        with torch.no_grad():
            try:
                found.append(deed(net))
            except Exception as exc:
                found.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    return found[0]


@pytest.mark.parametrize("deed", DEEDS)
def test_other_threads_see_the_module_as_it_is(deed):
    global TURN
    net = made()
    with torch.no_grad():
        wanted = DEEDS[deed](made())
    found, main = [], threading.current_thread()

    def turn():
        if threading.current_thread() is main:
            found.append(in_another_thread(DEEDS[deed], net))

    TURN = turn
    try:
        with torch.no_grad():
            graph = record(lambda x: [net(x)], [X], net, frozenset())
    finally:
        TURN = None
    # in the forward of a capture, between two blocks
    assert len(found) == 4 and not any(isinstance(each, Exception) for each in found), found
    assert all(len(each) == len(wanted) and all(map(torch.allclose, each, wanted)) for each in found)
    assert torch.allclose(graph(X)[0], made()(X), atol=1e-6)


@torch.no_grad()
def test_a_capture_changes_no_attribute():
    global TURN
    net = made()
    before, seen = attributes(net), []
    TURN = lambda: seen.append(attributes(net))
    try:
        record(lambda x: [net(x)], [X], net, frozenset())
    finally:
        TURN = None
    assert seen == [before] * len(seen) and seen


@torch.no_grad()
def test_copies_in_a_loop_while_plans_are_made():
    net, wanted = made(), made().state_dict()
    accelerator = accelerate(net, Config(allow_cpu=True, drop_slower=False))
    stop, wrong = threading.Event(), []

    def copies():
        while not stop.is_set():
            for deed in (copy.deepcopy, saved, lambda m: pickle.loads(pickle.dumps(m))):
                try:
                    wrong.extend(k for k, v in deed(net).named_parameters() if not torch.equal(v, wanted[k]))
                except Exception as exc:
                    wrong.append(exc)

    thread = threading.Thread(target=copies)
    thread.start()
    for side in range(4, 14):
        x = torch.randn(1, 4, side, side)
        for _ in range(2):
            assert torch.allclose(net(x), made()(x), atol=1e-5)
    stop.set()
    thread.join()
    assert not wrong and accelerator.report.counter("captures") > 2
    accelerator.release()
