"""The GPU that the program computes on need not be torch's current one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sfast_ext import eight_bits, environment, host_gpu
from sfast_ext.hosts import gpu_room, starting
from sfast_ext.kernels.backend import triton_runtime

GIB = 1 << 30


def properties(name: str, gib: int, major: int, minor: int, **more: str) -> SimpleNamespace:
    given = {"total_memory": gib * GIB, "multi_processor_count": 20, **more}
    return SimpleNamespace(name=name, major=major, minor=minor, **given)


CARDS = [
    properties("GeForce GTX 1080", 8, 6, 1, uuid="a"),
    properties("GeForce RTX 4090", 24, 8, 9, uuid="b"),
    properties("GeForce RTX 4090", 24, 8, 9, uuid="c"),
    properties("GeForce RTX 3060", 12, 8, 6),
]
FREE = [1 * GIB, 20 * GIB, 9 * GIB, 3 * GIB]


def index_of(device: object) -> int:
    """Of a device as torch's functions take it: the current one is the first."""
    found = device if isinstance(device, int) else getattr(device, "index", None)
    return 0 if found is None else found


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of four cards, the first of which is current and too old."""
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: len(CARDS),
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: CARDS[index_of(device)].name,
        "get_device_properties": lambda device=None: CARDS[index_of(device)],
        "get_device_capability": lambda device=None: (CARDS[index_of(device)].major, CARDS[index_of(device)].minor),
        "mem_get_info": lambda device=None: (FREE[index_of(device)], CARDS[index_of(device)].total_memory),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    # what is known of other cards of these numbers
    asked = (environment.unserved, triton_runtime.capability)
    for each in asked:
        each.cache_clear()
    yield
    for each in asked:
        each.cache_clear()
    host_gpu.use(None)


def test_it_is_the_current_one_unless_it_is_told(cards):
    for told in (None, torch.device("cuda"), torch.device("cpu"), torch.device("cuda:9")):
        host_gpu.use(torch.device("cuda:2"))
        host_gpu.use(told)
        assert host_gpu.index() == 0, told
    host_gpu.use(torch.device("cuda:2"))
    assert host_gpu.device() == torch.device("cuda:2")


@pytest.mark.parametrize("index", range(4))
def test_what_is_said_of_the_machine_is_said_of_that_card(cards, index):
    host_gpu.use(torch.device("cuda", index))
    total = CARDS[index].total_memory
    assert environment.gpu_memory() == total
    assert environment.graph_budget_mb() == min(4096, total >> 22)
    assert CARDS[index].name in environment.in_short()
    assert environment.describe()["gpu"] == CARDS[index].name
    assert environment.describe()["gpu_memory_mb"] == total >> 20
    assert (environment.no_gpu() is None) == (index > 0)
    assert gpu_room.free_bytes() == FREE[index]


@pytest.mark.parametrize("chosen", [0, 1, 3])
def test_graphs_on_another_card_have_its_budget(cards, chosen):
    host_gpu.use(torch.device("cuda", chosen))
    budgets = [environment.graph_budget_mb(torch.device("cuda", index)) for index in range(4)]
    assert budgets == [2048, 4096, 4096, 3072]
    assert environment.graph_budget_mb(torch.device("cpu")) == environment.graph_budget_mb() == budgets[chosen]


def test_eight_bits_are_refused_for_the_card_that_computes(cards):
    reasons = []
    for index in (0, 1):
        host_gpu.use(torch.device("cuda", index))
        refused = eight_bits.refusal()
        reasons.append("6.1" in str(refused))
    assert reasons == [True, False]


def test_cards_of_one_name_are_told_apart_and_stay_the_same(cards, monkeypatch):
    known = [host_gpu.card(torch.device("cuda", index)) for index in range(4)]
    assert len(set(known)) == 4
    assert known == [host_gpu.card(torch.device("cuda", index)) for index in range(4)]
    assert known[1].startswith("GeForce RTX 4090 ") and host_gpu.card(torch.device("cpu")) == ""
    # before torch 2.4 there is no number of the card
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert host_gpu.card(torch.device("cuda:3")) != known[3]


@pytest.mark.parametrize(
    ("said", "index"),
    [
        (torch.device("cuda:1"), 1),
        (torch.device("cuda:3"), 3),
        (torch.device("cuda"), 0),
        (torch.device("cpu"), 0),
        (None, 0),
        ("cuda:2", 0),
        (torch.device("cuda:7"), 0),
    ],
)
def test_a_host_says_it_in_its_devices(cards, monkeypatch, said, index):
    package, devices = ModuleType("modules"), ModuleType("modules.devices")
    devices.device = said  # type: ignore[attr-defined]
    package.devices = devices  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modules", package)
    monkeypatch.setitem(sys.modules, "modules.devices", devices)
    starting.choose_gpu()
    assert host_gpu.index() == index


def test_a_host_that_says_nothing_computes_on_the_current_one(cards, monkeypatch):
    host_gpu.use(torch.device("cuda:2"))
    monkeypatch.setitem(sys.modules, "modules", ModuleType("modules"))
    monkeypatch.delitem(sys.modules, "modules.devices", raising=False)
    starting.choose_gpu()
    assert host_gpu.index() == 0
