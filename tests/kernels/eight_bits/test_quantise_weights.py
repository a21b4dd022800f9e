"""Weights as int8: what changed is quantised again, and nothing else is written."""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.eight_bits.codes import same_codes
from kernels.support import HALF, half_dtype, randn
from sfast_ext.kernels.backend import launch_log, registry
from sfast_ext.kernels.eight_bits import quantise_rows, quantise_weights


@pytest.fixture
def device(quantiser_device):
    return quantiser_device


class Bank(NamedTuple):
    weights: list[Tensor]
    rows: list[Tensor]
    scales: list[Tensor]
    digests: list[Tensor]
    groups: list[int]

    def quantise(self) -> None:
        given = quantise_weights.launch(*self)
        assert isinstance(given, list) and all(a is b for a, b in zip(given, self.rows, strict=True))

    def poison(self) -> None:
        """Other codes and scales, which stay there if nothing is written."""
        for row, scale in zip(self.rows, self.scales):
            row.fill_(-128)
            scale.fill_(math.nan)

    def written(self) -> list[list[bool]]:
        """Which rows of each weight were written since `poison`; right, if so."""
        found = []
        for weight, row, scale, digest, group in zip(*self):
            changed = ~(row == -128).all(-1)
            assert torch.equal(row == -128, ~changed[:, None].expand_as(row))
            turned = quantise_rows.rotated(weight[changed].double(), group)
            same_codes(row[changed], scale[changed], turned, decided=1e-3, ulps=8 if group else 1)
            assert bool(scale[~changed].isnan().all())
            assert torch.equal(digest, quantise_weights.digest_of_rows(weight, group))
            found.append(changed.tolist())
        return found


def bank(weights: list[Tensor], groups: list[int]) -> Bank:
    made = Bank(
        weights,
        [torch.empty(weight.shape, dtype=torch.int8, device=weight.device) for weight in weights],
        [torch.empty(len(weight), device=weight.device) for weight in weights],
        [torch.zeros(len(weight), dtype=torch.int64, device=weight.device) for weight in weights],
        groups,
    )
    made.poison()
    return made


SHAPES = [
    (5, 320, 64),
    (11, 640, 128),
    (3, 1280, 256),
    (2, 5120, 256),
    (9, 640, 0),
    (4, 72, 0),
    (1, 64, 64),
    (6, 2560, 128),
]
ODD = [(5, 30, 0), (3, 77, 0), (2, 1, 0), (7, 1283, 0)]


def weights_of(shapes, dtype, device):
    weights = [randn(rows, columns, dtype=dtype, device=device, std=0.1) for rows, columns, _ in shapes]
    return bank(weights, [group for *_, group in shapes])


def every(shapes):
    return [[True] * rows for rows, *_ in shapes]


def none(shapes):
    return [[False] * rows for rows, *_ in shapes]


@half_dtype
def test_a_new_bank_is_quantised_and_then_left_alone(device, dtype):
    shapes = SHAPES + ODD
    made = weights_of(shapes, dtype, device)
    made.quantise()
    assert made.written() == every(shapes)
    made.poison()
    for _ in range(2):
        made.quantise()
        assert made.written() == none(shapes)


def test_what_changed_is_quantised_again(device):
    made = weights_of(SHAPES + ODD, torch.float16, device)
    made.quantise()
    made.poison()
    changed = none(SHAPES + ODD)
    for place, (rows, columns, _) in enumerate(SHAPES + ODD):
        row = place % rows
        made.weights[place][row, columns - 1] += 1
        changed[place][row] = True
    made.quantise()
    assert made.written() == changed
    made.poison()
    made.weights[3].add_(0.01)  # as a LoRA
    made.weights[0].copy_(made.weights[0].flip(0))
    made.quantise()
    assert made.written() == [
        [n == 3 or n == 0 and row != 2 for row in range(len(x))] for n, x in enumerate(made.weights)
    ]


def test_what_was_changed_back_is_quantised_again(device):
    made = weights_of(SHAPES[:2], torch.float16, device)
    made.quantise()
    before = [row.clone() for row in made.rows]
    made.weights[1].mul_(2)
    made.quantise()
    made.weights[1].div_(2)
    made.quantise()
    assert all(torch.equal(a, b) for a, b in zip(made.rows, before))


def test_a_weight_that_moved_is_not_quantised_again(device):
    made = weights_of(SHAPES, torch.float16, device)
    made.quantise()
    made.poison()
    for place, weight in enumerate(made.weights):
        rows, columns = weight.shape
        # rows further apart, at an odd place, and dense at an odd place
        memory = torch.zeros(rows * (columns + 24) + 9, dtype=torch.float16, device=device)
        stride, begin = [(columns, 0), (columns + 24, 8), (columns + 3, 0), (columns, 1)][place % 4]
        made.weights[place] = memory.as_strided((rows, columns), (stride, 1), begin).copy_(weight)
    made.quantise()
    assert made.written() == none(SHAPES)
    made.weights[1][4] = 0
    made.quantise()
    assert made.written() == [[n == 1 and row == 4 for row in range(rows)] for n, (rows, *_) in enumerate(SHAPES)]


@half_dtype
def test_weights_of_convolutions_as_they_lie_in_memory(device, dtype):
    """Rows of taps, each of all channels; among weights of linear layers."""
    sizes = [(5, 64, 3, 3), (3, 320, 3, 3), (2, 30, 3, 3), (4, 2, 3, 3), (1, 2560, 3, 3)]
    images = [randn(*size, dtype=dtype, device=device, std=0.1) for size in sizes]
    images = [weight.contiguous(memory_format=torch.channels_last) for weight in images]
    linear = randn(4, 72, dtype=dtype, device=device)
    rows = [linear, *(weight.permute(0, 2, 3, 1).reshape(len(weight), -1) for weight in images)]
    made = bank(rows, [0] * len(rows))
    both = [torch.full((10, len(weight)), math.nan, device=device) for weight in rows]
    both[0] = both[0][0]
    made = made._replace(scales=[each[0] if each.dim() == 2 else each for each in both])
    given = made._replace(weights=[linear, *images], scales=both)
    given.quantise()
    for scale, row in zip(both[1:], made.rows[1:]):
        assert torch.equal(scale[1], row.sum(-1, dtype=torch.float32))
        assert torch.equal(scale[1:], quantise_weights.sums_of_codes(row))
    assert made.written() == [[True] * len(weight) for weight in rows]
    for codes, row in zip(quantise_weights.reference(*given), made.rows):
        assert codes.shape == row.shape and (codes.int() - row).abs().sum() <= 1 + 3e-3 * row.numel()
    made.poison()
    sums = [scale[1].clone() for scale in both[1:]]
    images[1][2, 319, 2, 2] += 1
    given.quantise()
    made.weights[2] = images[1].permute(0, 2, 3, 1).reshape(3, -1)
    assert made.written() == [[n == 2 and row == 2 for row in range(len(weight))] for n, weight in enumerate(rows)]
    assert both[2][1, 2] == made.rows[2][2].sum() and both[2][1, 2] != sums[1][2]
    sums[1][2] = both[2][1, 2]
    assert all(torch.equal(scale[1], before) for scale, before in zip(both[1:], sums))
    again = bank(rows, [0] * len(rows))._replace(weights=[linear, *images], scales=[t.clone() for t in both])
    quantise_weights.in_place(*again)
    assert all(torch.equal(a, b) for a, b in zip(again.digests, made.digests))
    assert (again.scales[1][1] - again.rows[1].sum(-1)).abs().max() == 0
    reason = str(quantise_weights.accepts(*given._replace(scales=made.scales)))
    assert "another shape" in reason
    reason = str(quantise_weights.accepts(*given._replace(weights=[linear, *(w.contiguous() for w in images)])))
    assert "channels last" in reason
    point = randn(4, 128, 1, 1, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
    alone = bank([point.flatten(1)], [0])._replace(weights=[point], scales=[both[1].new_zeros(10, 4)])
    assert "not 3x3" in str(quantise_weights.accepts(*alone))


def test_banks_at_odd_places(device):
    weight = randn(6, 320, dtype=torch.float16, device=device)
    made = bank([weight, weight], [64, 0])
    for place, memory in enumerate(torch.empty(6 * 320 + 3, dtype=torch.int8, device=device) for _ in range(2)):
        made.rows[place] = memory[2 * place + 1 : 2 * place + 1 + 6 * 320].view(6, 320)
    made.poison()
    made.quantise()
    assert made.written() == [[True] * 6] * 2


def test_more_weights_than_a_launch_takes(device, monkeypatch):
    shapes = [(1 + n % 3, 64, 64 * (n % 2)) for n in range(2 * quantise_weights.ENTRIES + 5)]
    made = weights_of(shapes, torch.float16, device)
    # weights of two dtypes, and one without rows
    made.weights[70] = made.weights[70].bfloat16()
    made.weights[71] = torch.ones(0, 64, dtype=torch.float16, device=device)
    for name in ("rows", "scales", "digests"):
        getattr(made, name)[71] = getattr(made, name)[71][:0]
    shapes[71] = 0, 64, 0
    launches = []
    original = quantise_weights.launch_kernel

    def launch_kernel(*args, **constants):
        launches.append(constants)
        original(*args, **constants)

    monkeypatch.setattr(quantise_weights, "launch_kernel", launch_kernel)
    made.quantise()
    assert made.written() == every(shapes) and len(launches) == 4
    made.poison()
    made.weights[-1][0, 0] = 7
    made.quantise()
    changed = none(shapes)
    changed[-1][0] = True
    assert made.written() == changed


def test_few_warps_take_all_rows(device, monkeypatch):
    monkeypatch.setattr(quantise_weights, "multiprocessors", lambda device: 1)
    monkeypatch.setattr(quantise_weights, "_BLOCKS", 1)
    shapes = [(1, 64, 0), (40, 72, 0), (1, 128, 64), (3, 64, 0), (21, 320, 64)]
    made = weights_of(shapes, torch.float16, device)
    made.quantise()
    assert made.written() == every(shapes)


def test_another_group_is_another_digest(device):
    weight = randn(4, 256, dtype=torch.float16, device=device)
    found = [quantise_weights.digest_of_rows(weight, group) for group in quantise_rows.GROUPS]
    found.append(quantise_weights.digest_of_rows(weight.view(torch.bfloat16), 0))
    assert len(set(torch.cat(found).tolist())) == 20
    made = bank([weight], [64])
    made.quantise()
    made.poison()
    made.groups[0] = 128
    made.quantise()
    assert made.written() == [[True] * 4]


def test_rows_of_zeros_and_of_what_is_no_number(device):
    weight = randn(6, 320, dtype=torch.float16, device=device)
    weight[0] = 0
    weight[1] = -0.0
    weight[2, 4], weight[3, 5] = math.nan, math.inf
    made = bank([weight, weight], [0, 64])
    made.quantise()
    assert made.written() == [[True] * 6] * 2
    for row, scale in zip(made.rows, made.scales):
        assert not row[:4].any() and scale[:2].tolist() == [1, 1] and scale[2:4].isnan().all()
    assert all(digest.ne(0).all() for digest in made.digests)
    before = [digest.clone() for digest in made.digests]
    weight[0] = -0.0  # other bits, the same codes
    made.quantise()
    assert [torch.ne(a, b).tolist() for a, b in zip(made.digests, before)] == [[True] + [False] * 5] * 2


def test_no_digest_is_zero(monkeypatch):
    """A row whose digest would be 0 has another one."""
    monkeypatch.setattr(quantise_weights, "_high", lambda a, b: a * b)
    monkeypatch.setattr(quantise_weights, "_SEED", 0)
    assert quantise_weights.digest_of_rows(torch.ones(3, 20).half()).tolist() == [1, 1, 1]


@half_dtype
def test_single_elements_and_structured_changes_have_other_digests(dtype):
    """10,000 changes of one row, which all differ from it and from each other."""
    columns = 640
    row = torch.randn(columns, dtype=torch.float32).mul(0.05).to(dtype)
    bits = row.view(torch.int16)
    places = torch.randint(columns, (4000,))
    flipped = bits.repeat(4000, 1)
    flipped[torch.arange(4000), places] ^= (1 << torch.randint(16, (4000,))).to(torch.int16)
    added = row.repeat(2000, 1)
    added[torch.arange(2000), places[:2000]] += torch.randn(2000).to(dtype)
    swapped, pairs = row.repeat(2000, 1), torch.randint(columns, (2000, 2))
    for n, (a, b) in enumerate(pairs.tolist()):
        swapped[n, [a, b]] = row[[b, a]]
    signs = row * (torch.rand(500, columns) < 0.99).to(dtype).mul(2).sub(1)
    rolled = torch.stack([row.roll(n) for n in range(columns)])
    scaled = row * torch.linspace(0.5, 1.5, 500)[:, None].to(dtype)
    permuted = torch.stack([row[torch.randperm(columns)] for _ in range(400)])
    many = torch.cat([flipped.view(dtype), added, swapped, signs, rolled, scaled, permuted, row[None]])
    assert len(many) > 10000
    given = {tuple(each) for each in many.view(torch.int16).tolist()}
    assert len(set(quantise_weights.digest_of_rows(many).tolist())) == len(given)


@pytest.mark.parametrize("kind", ["signs", "last bits", "equal distance", "packs", "complement"])
def test_changes_that_cancel_in_a_sum(kind):
    """Several elements change in the same way, in opposite directions, or by an exchange: of rows of equal values."""
    rows, columns = 4096, 64
    bits = torch.full((rows, columns), 0x3C00, dtype=torch.int16)
    if kind == "signs":  # each set of 12 elements
        chosen = torch.arange(rows)[:, None] >> torch.arange(12) & 1
        bits[:, 3:63:5] |= (chosen << 15).to(torch.int16)
    elif kind == "last bits":
        chosen = torch.arange(rows)[:, None] >> torch.arange(12) & 1
        bits[:, ::6][:, :11] ^= chosen[:, :11].to(torch.int16)
        bits[:, 1] ^= chosen[:, 11].to(torch.int16)
    elif kind == "equal distance":  # one goes up as another goes down
        step = torch.arange(rows).to(torch.int16)
        bits[:, 5] += step
        bits[:, 5 + 32] -= step
    elif kind == "packs":
        bits = torch.randint(-(2**15), 2**15, (1, columns), dtype=torch.int16).repeat(rows, 1)
        order = torch.stack([torch.randperm(columns // 8) for _ in range(rows)])
        bits = bits.view(rows, 8, 8).gather(1, order[..., None].expand(-1, -1, 8)).view(rows, columns)
    else:
        chosen = torch.arange(rows)[:, None] >> torch.arange(12) & 1
        bits[:, :12] ^= -chosen.to(torch.int16)
    found = quantise_weights.digest_of_rows(bits.view(torch.float16)).tolist()
    assert len(set(found)) == len({tuple(row) for row in bits.tolist()}) > 1000


def test_bits_of_digests_are_even():
    """Each bit of a digest changes in half of the cases, whichever bit of a row does."""
    row = torch.randn(1, 320).half().view(torch.int16)
    places = torch.arange(320 * 16)
    many = row.repeat(len(places), 1)
    many[places, places // 16] ^= (1 << places % 16).to(torch.int16)
    differing = quantise_weights.digest_of_rows(many.view(torch.float16)) ^ quantise_weights.digest_of_rows(
        row.view(torch.float16)
    )
    share = (differing[:, None] >> torch.arange(64) & 1).double()
    assert bool(((share.mean(0) - 0.5).abs() < 0.05).all())  # of 5120 cases, seven standard deviations
    assert bool(((share.view(320, 16, 64).mean((0, 2)) - 0.5).abs() < 0.05).all())


@pytest.mark.parametrize("value", [0.0, 1.0, None], ids=str)
def test_no_two_changes_of_bits_cancel(value):
    """Of a row of zeros, of equal values, and at random: the changes of the digest by each bit, and by each two bits of
    different packs, are all different, and none is the negative of another."""
    row = (torch.randn(1, 64) if value is None else torch.full((1, 64), value)).half().view(torch.int16)
    places = torch.arange(64 * 16)
    many = row.repeat(len(places), 1)
    many[places, places // 16] ^= (1 << places % 16).to(torch.int16)
    change = quantise_weights.digest_of_rows(many.view(torch.float16)) - quantise_weights.digest_of_rows(
        row.view(torch.float16)
    )
    both = change[:, None] + change
    packs = places // 128
    pairs = both[(packs[:, None] < packs)]
    found = torch.cat([change, -change, pairs, -pairs])
    assert len(found) > 900_000 and len(found.unique()) == len(found) and bool(found.all())


def test_it_is_a_sum_of_products_of_128_bits():
    weight = torch.randn(3, 29).half()
    found = []
    for row in weight.view(torch.int16).tolist():
        numbers = [x % 2**16 for x in row] + [0] * 3
        total = quantise_weights._SEED * ((29 << 16 | 0) * 2)
        for pack in range(4):
            words = [sum(numbers[8 * pack + 4 * half + i] << 16 * i for i in range(4)) for half in range(2)]
            keys = [start + pack * key for start, key in zip(quantise_weights._STARTS, quantise_weights._KEYS)]
            a, b = (word ^ key % 2**64 for word, key in zip(words, keys))
            total += a * b % 2**64 ^ a * b >> 64
        found.append((total + 2**63) % 2**64 - 2**63)
    assert quantise_weights.digest_of_rows(weight).tolist() == found


def test_on_a_cpu_pytorch_does_the_same():
    made = weights_of(SHAPES + ODD, torch.float16, torch.device("cpu"))
    registry._declined.clear()
    made.quantise()
    assert made.written() == every(SHAPES + ODD)
    made.poison()
    made.weights[2][1] *= 2
    made.quantise()
    assert made.written() == [[n == 2 and row == 1 for row in range(len(x))] for n, x in enumerate(made.weights)]
    assert "not for this device" in next(iter(registry.declined()["quantise_weights"]))


def test_an_interrupted_launch_leaves_no_digest_of_other_codes():
    """The digest is erased before, and stored after: as the source has it, since no launch ends early here."""
    source = (quantise_weights.nvrtc.SOURCES / "quantise_weights.cu").read_text()
    kernel = source[source.index("any_of_warp(now != before)") :]
    order = [kernel.index(text) for text in ("*digest = 0", "quantise(row", "*digest = now")]
    fences = [n for n in range(len(kernel)) if kernel.startswith("__threadfence()", n)]
    assert order == sorted(order) and order[0] < fences[0] < order[1] < fences[1] < order[2]


HALF_MATRIX = torch.ones(4, 64, dtype=torch.float16)
BANK = torch.ones(4, 64, dtype=torch.int8), torch.ones(4), torch.ones(4, dtype=torch.int64)
REFUSED = {
    "lists": ([HALF_MATRIX] * 2, *([x] for x in BANK), [0, 0]),
    "no matrix": ([HALF_MATRIX[0]], *([x] for x in BANK), [0]),
    "half precision": ([HALF_MATRIX.float()], *([x] for x in BANK), [0]),
    "lie apart": ([HALF_MATRIX.t().contiguous().t()], *([x] for x in BANK), [0]),
    "divided": ([HALF_MATRIX], *([x] for x in BANK), [128]),
    "a bank": ([HALF_MATRIX[:3]], *([x] for x in BANK), [0]),
    "another shape, dtype": ([HALF_MATRIX], [BANK[0].to(torch.uint8)], *([x] for x in BANK[1:]), [0]),
    "dtype or layout": ([HALF_MATRIX], [BANK[0]], [BANK[1].double()], [BANK[2]], [0]),
    "or layout": ([HALF_MATRIX], [BANK[0].t().contiguous().t()], [BANK[1]], [BANK[2]], [0]),
    "too long": (
        [torch.ones(1, 65544).half()],
        [torch.ones(1, 65544).to(torch.int8)],
        [BANK[1][:1]],
        [BANK[2][:1]],
        [0],
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_does_not_take(reason, monkeypatch):
    monkeypatch.setattr(quantise_weights.nvrtc.Source, "supported", lambda source, device: True)
    assert reason in str(quantise_weights.accepts(*REFUSED[reason]))
    assert quantise_weights.accepts([HALF_MATRIX], *([x] for x in BANK), [64]) is None


def test_tensors_of_several_devices(monkeypatch):
    monkeypatch.setattr(quantise_weights.nvrtc.Source, "supported", lambda source, device: True)
    banks = [[x] * 2 for x in BANK]
    away = HALF_MATRIX.to("meta")
    assert quantise_weights.accepts([HALF_MATRIX] * 2, *banks, [0, 0]) is None
    assert "several devices" in str(quantise_weights.accepts([HALF_MATRIX, away], *banks, [0, 0]))
    for place, x in enumerate(BANK):
        others = [*banks]
        others[place] = [x, x.to("meta")]
        assert "several devices" in str(quantise_weights.accepts([HALF_MATRIX] * 2, *others, [0, 0]))
        others[place] = [x, torch.nn.Parameter(x, requires_grad=False)]
        assert quantise_weights.accepts([HALF_MATRIX] * 2, *others, [0, 0]) is None
        others[place] = [x, x.as_subclass(type("Other", (Tensor,), {}))]
        assert "a subclass" in str(quantise_weights.accepts([HALF_MATRIX] * 2, *others, [0, 0]))


def test_nothing_to_do():
    assert quantise_weights.launch([], [], [], [], []) == []


def test_the_table_has_room_among_a_kernel_s_parameters():
    assert ctypes.sizeof(quantise_weights._Table) + 8 <= 4096
    entries = [quantise_weights._Entry(HALF_MATRIX, *BANK, 0)] * 3
    (table, rows), threads, shared = quantise_weights._prepared(None, entries, **quantise_weights.constants(HALF[0]))
    assert isinstance(table, launch_log.AddressTable) and len(table.places) == 12 and rows.value == 12
    for place, tensor in table.places.items():
        assert ctypes.c_uint64.from_buffer(table.encoded, place).value == tensor.data_ptr()
    assert list(table.encoded.first)[:4] == [0, 4, 8, 12] and threads == 256 and shared == 0


@pytest.mark.parametrize(
    ("columns", "stride", "begin", "row", "aligned"),
    [
        (64, 64, 0, 0, True),
        (72, 72, 8, 8, True),
        (64, 96, 16, 16, True),
        (60, 64, 0, 0, False),
        (64, 68, 0, 0, False),
        (64, 65, 0, 0, False),
        (64, 64, 4, 0, False),
        (64, 64, 1, 0, False),
        (64, 64, 0, 4, False),
        (64, 64, 0, 1, False),
    ],
)
def test_what_is_read_and_written_by_whole_accesses(columns, stride, begin, row, aligned):
    weight = torch.zeros(500, dtype=torch.float16).as_strided((3, columns), (stride, 1), begin)
    codes = torch.zeros(500, dtype=torch.int8)[row : row + 3 * columns].view(3, columns)
    entry = quantise_weights._Entry(weight, codes, *BANK[1:], 0)
    (table, _), *_ = quantise_weights._prepared(None, [entry, entry], **quantise_weights.constants(torch.float16))
    assert table.encoded.aligned[0] == 3 * aligned


@pytest.mark.gpu
def test_a_cuda_graph_follows_weights():
    device = torch.device("cuda")
    made = weights_of([(640, 640, 128), (1280, 1280, 256), (77, 320, 0)], torch.float16, device)
    made.quantise()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantise_weights.launch(*made)
    made.poison()
    graph.replay()
    assert not any(map(any, made.written()))
    for step in range(3):
        made.poison()
        made.weights[1][step::7] *= 1.5
        graph.replay()
        found = made.written()
        assert not any(found[0]) and not any(found[2])
        assert found[1] == [(row - step) % 7 == 0 and row >= step for row in range(1280)]


@pytest.mark.gpu
def test_all_shapes_of_a_unet():
    device = torch.device("cuda")
    shapes = [(n * k, k, group) for k, group in ((320, 64), (640, 128), (1280, 256)) for n in (1, 3, 8)]
    shapes += [(k, 4 * k, 256) for k in (320, 640, 1280)]
    for dtype in HALF:
        made = weights_of(shapes, dtype, device)
        made.quantise()
        assert made.written() == every(shapes)
        made.poison()
        made.quantise()
        assert made.written() == none(shapes)
