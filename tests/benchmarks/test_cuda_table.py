"""The table of the kernels in CUDA C++: what counts as room on a card, and what a cell says."""

from __future__ import annotations

import pytest
import torch

from benchmarks.compile_table import cuda
from sfast_ext.kernels.backend import nvrtc

LAUNCH = cuda.Launch("bias_add", (("PACK", 8),), 256, 0)
LOG = "0 bytes stack frame, {spills} bytes spill stores\nUsed {registers} registers, 1024 bytes smem"


@pytest.mark.parametrize(
    ("capability", "threads", "registers", "shared", "blocks"),
    [
        (86, 256, 32, 0, 6),
        (86, 256, 64, 0, 4),
        (80, 1024, 64, 0, 1),
        (90, 96, 40, 0, 17),  # registers are given out to whole warps, in units of 256
        (75, 256, 32, 48 << 10, 1),
        (75, 256, 32, 65 << 10, 0),
        (86, 128, 32, 40 << 10, 2),
        (86, 128, 32, 50 << 10, 1),  # the system keeps 1 KB of each block's
    ],
)
def test_occupancy(capability, threads, registers, shared, blocks):
    card = cuda.CARDS[capability]
    expected = blocks * threads / card.threads
    assert cuda.occupancy(card, threads, registers, shared) == pytest.approx(expected, abs=1e-3)


@pytest.fixture
def logs(monkeypatch):
    """The compiler's log by architecture; it knows three cards."""
    found = {"sm_75": LOG.format(spills=0, registers=40), "sm_86": LOG.format(spills=16, registers=128)}
    monkeypatch.setattr(nvrtc, "targets", lambda: ("12.1", (75, 86, 87)))
    monkeypatch.setattr(nvrtc, "build", lambda source, architecture, constants: (b"", found[architecture]))


def test_the_worst_launch_of_a_kernel_counts(logs):
    found = cuda.compile_all([LAUNCH, LAUNCH._replace(threads=512, shared=2048)])
    assert set(found) == {"75", "86"}
    row = found["86"]["bias_add"]
    assert row == {"launches": 2, "registers": 128, "spills": 16, "shared": 3072, "occupancy": 0.333}
    other = {"75": {"bias_add": {**found["75"]["bias_add"], "registers": 44}}}
    page = cuda.render({"12.1.105": found, "13.0.88": other})
    # of two versions the range of registers and the least occupancy; spills by name
    assert "| `bias_add` | 2 | 3.0 | 40–44 / 100 | 128 / 33, **16 spilled** by 12.1.105 |" in page


def test_what_needs_a_later_card_is_compiled_for_those(logs):
    found = cuda.compile_all([LAUNCH, LAUNCH._replace(name="mma_attention", least=80)])
    assert set(found["75"]) == {"bias_add"} and set(found["86"]) == {"bias_add", "mma_attention"}
    assert cuda.render({"12.1.105": found}).count("| – |") == 1


@pytest.mark.long(but=[0])
@pytest.mark.parametrize(("dtype", "least"), [("float16", 75), ("bfloat16", 80)])
def test_attention_on_tensor_cores_is_for_later_cards(dtype, least):
    launches = cuda.collect(["tiny-sd15:64x64"], [dtype])
    attentions = [launch for launch in launches if launch.name == "mma_attention"]
    assert attentions and {launch.least for launch in attentions} == {least}
    assert {launch.least for launch in launches if launch.name == "geglu"} == {70}


def test_launches_are_those_of_a_plan_without_triton():
    launches = cuda.collect(["tiny-sd15:64x64"], ["float16"])
    names = {launch.name for launch in launches}
    assert {"group_norm_whole", "layer_norm", "geglu", "mma_gemm"} <= names
    assert {"quantise_rows", "quantise_weights", "layer_norm8"} <= names
    for launch in launches:
        cards = [card for number, card in cuda.CARDS.items() if cuda.launched_on(launch, number)]
        assert launch.threads % 32 == 0 and launch.shared <= min(card.shared_of_block for card in cards)


def test_products_in_8_bits_have_all_tiles_of_each_card():
    launches = cuda.in_8_bits()
    attentions = [launch for launch in launches if launch.name in (cuda._ATTENTION, cuda._KEYS)]
    launches = [launch for launch in launches if launch not in attentions]
    assert all(cuda.launched_on(launch, 86) and not cuda.launched_on(launch, 70) for launch in attentions)
    assert all(launch.shared <= card.shared_of_block for launch in attentions for card in cuda.CARDS.values())
    for capability, card in cuda.CARDS.items():
        its = [launch for launch in launches if cuda.launched_on(launch, capability)]
        tiles = {cuda.mma_gemm.tile_of(dict(launch.constants)) for launch in its}
        known = capability >= 75
        assert tiles == (set(cuda.mma8_tiles.shapes(divmod(capability, 10))) if known else set())
        assert all(launch.shared <= card.shared_of_block for launch in its)
        assert {dict(launch.constants)["EPILOGUE"] for launch in its} == ({0, 1, 2} if known else set())


def test_products_are_launched_on_the_cards_whose_tiles_they_have():
    def launch(capability, half_sums):
        tile = cuda.mma_tiles.shapes(divmod(capability, 10), half_sums)[0]
        given = cuda.mma_gemm.constants(tile, torch.float16, half_sums=half_sums)
        return cuda.Launch("mma_gemm", tuple(sorted(given.items())), tile.threads, 0, least=capability)

    for half_sums in (False, True):
        found = {n: [c for c in cuda.CARDS if cuda.launched_on(launch(n, half_sums), c)] for n in (75, 80, 86)}
        assert found == {75: [75], 80: [80], 86: [86, 89, 120]}
    of_halves = cuda.with_faster_sums(launch(86, False), 86)
    assert of_halves == launch(86, True)._replace(shared=of_halves.shared)
    assert of_halves.shared == cuda.mma_tiles.shared_bytes(cuda.mma_gemm.tile_of(dict(of_halves.constants)), False)
    assert cuda.launched_on(launch(86, False)._replace(name="geglu", least=70), 70)
