"""What cards can reach at best: the work of nodes, the loops of machine code, the page."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from benchmarks.cards import least, loops, page
from benchmarks.cards.published import CARDS, Card
from sfast_ext.kernels.attention import attention
from sfast_ext.kernels.pointwise import geglu, layer_norm, norm_rotary

# a loop within a loop: the inner one has an instruction of each unit, and a copy that no unit is told of
CODE = """
.L_x_1:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_2:
        /*0010*/                   LDSM.16.M88.4 R4, [R3] ;
        /*0020*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0030*/                   HMMA.16816.F16 R8, R4, R6, R8 ;
        /*0040*/                   MUFU.EX2 R9, R9 ;
        /*0050*/                   NOP ;
        /*0060*/              @!P0 BRA `(.L_x_2) ;
        /*0070*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0080*/               @P1 BRA `(.L_x_1) ;
        /*0090*/                   BRA `(.L_x_9) ;
"""


def test_the_inner_loop_is_counted_and_bound_by_the_tensor_cores() -> None:
    loop = loops.main_loop(CODE)
    assert loop == loops.Loop(5, 1, 1, 1, 1)
    integers = loops.main_loop(CODE.replace("HMMA.16816.F32", "IMMA.16832.S8.S8"))
    assert (integers.integers, integers.sums_in_float32, integers.tensor_clocks) == (1, 0, 32)
    assert (loop.tensor_clocks, loop.clocks, loop.of_the_tensor_cores) == (48, 48, 1.0)


@pytest.mark.parametrize(
    ("loop", "clocks"), [((100, 1, 0, 0, 0), 100), ((9, 1, 0, 8, 0), 64), ((9, 1, 0, 0, 3), 48)],
    ids=["instructions", "exponentials", "shared memory"],
)  # fmt: skip
def test_what_takes_longest_bounds_a_loop(loop, clocks) -> None:
    assert loops.Loop(*loop).clocks == clocks and loops.Loop(*loop).of_the_tensor_cores == 32 / clocks


def test_code_without_tensor_cores_is_refused() -> None:
    with pytest.raises(ValueError, match="No loop with instructions of the tensor cores"):
        loops.main_loop(CODE.replace("HMMA", "FFMA"))


def test_published_rates() -> None:
    # of NVIDIA's whitepapers: an RTX 3080 and an RTX 4090
    assert Card(86, 68, 1.71, 760.3).tflops == pytest.approx(59.5, abs=0.1)
    assert CARDS["GeForce RTX 4090"].tflops == pytest.approx(165.2, abs=0.1)
    assert CARDS["GeForce RTX 2080 Ti"].tflops == pytest.approx(53.8, abs=0.1)
    assert CARDS["GeForce RTX 3090"].tflops == pytest.approx(71, abs=0.5)
    for card, tops in ((Card(86, 68, 1.71, 760.3), 238), (CARDS["GeForce RTX 4090"], 660.6)):
        assert card.tops == pytest.approx(tops, abs=0.3)
    assert CARDS["GeForce RTX 2080 Ti"].tops == pytest.approx(215.2, abs=0.1)


def test_work_and_least_time_of_nodes() -> None:
    graph = fx.Graph()
    x, weight, bias = (graph.placeholder(name) for name in ("x", "weight", "bias"))
    flat = graph.call_function(torch.ops.aten.view.default, (x, [6, 64]))
    y = graph.call_function(torch.ops.aten.linear.default, (flat, weight, bias))
    gate = graph.call_function(geglu.launch, (y,))
    half = {"dtype": torch.float16, "device": "meta"}
    for node, size in (
        (x, (2, 3, 64)),
        (weight, (32, 64)),
        (bias, (32,)),
        (flat, (6, 64)),
        (y, (6, 32)),
        (gate, (6, 16)),
    ):
        node.meta["val"] = torch.empty(size, **half)
    work = [least.of_node(node) for node in graph.nodes]
    linear = least.Work("linear", 2 * 6 * 64 * 32, 2 * (6 * 64 + 32 * 64 + 32 + 6 * 32), 0.5)
    assert work == [None] * 4 + [linear, least.Work("GEGLU", 0, 2 * (6 * 32 + 6 * 16))]

    card = Card(86, 1, 1.0, 1e3)  # 0.512 TFLOP/s, 1 TB/s
    times = least.milliseconds(filter(None, work), card)
    assert times == {"linear": pytest.approx(24576 / 0.512e9), "GEGLU": pytest.approx(576 / 1e9)}
    assert least.milliseconds([linear], card, faster_sums=True)["linear"] == pytest.approx(24576 / 1.024e9)
    # a product so small that its bytes take longer
    assert least.milliseconds([least.Work("linear", 10, 1000)], card)["linear"] == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("keys", "part", "maker"),
    [
        (161, 0.75, torch.ops.aten.linear.default),
        (160, 1.0, torch.ops.aten.linear.default),
        # as in a transformer: its keys stay in half precision
        (161, 0.75, norm_rotary.launch),
    ],
)
def test_half_of_the_products_of_attention_to_many_keys_are_faster(keys: int, part: float, maker: Any) -> None:
    graph = fx.Graph()
    q, v = (graph.placeholder(name) for name in "qv")
    k = graph.call_function(maker, (q, v))
    node = graph.call_function(attention.launch, (q, k, v), {"scale": None})
    for each, rows in ((q, 4096), (k, keys), (v, keys), (node, 4096)):
        each.meta["val"] = torch.empty((2, 8, rows, 40), dtype=torch.float16, device="meta")
    work = least.of_node(node)
    assert work is not None and (work.kind, work.faster) == ("attention", part)
    card = Card(86, 1, 1.0, 1e6)
    exact, faster = (least.milliseconds([work], card, faster_sums=chosen)["attention"] for chosen in (False, True))
    assert faster == pytest.approx(part * exact)
    # those of queries and keys take a quarter in 8 bits; a kernel reads the keys and writes them
    codes, both = (least.milliseconds([work], card, faster_sums=s, eight_bits=True)["attention"] for s in (False, True))
    many = part < 1 and maker is not norm_rotary.launch
    written = 3 * k.meta["val"].numel() / 1e12 if many else 0.0
    assert codes == pytest.approx((0.625 if many else 1) * exact + written)
    assert both == pytest.approx((0.375 if many else part) * exact + written)


def of_linear(rows: int, terms: int, of_norm: bool) -> least.Work:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    normed = graph.call_function(layer_norm.launch if of_norm else geglu.launch, (x,))
    flat = graph.call_function(torch.ops.aten.view.default, (normed, [rows, terms]))
    node = graph.call_function(torch.ops.aten.linear.default, (flat, weight))
    for each, size in ((normed, (1, rows, terms)), (flat, (rows, terms)), (weight, (96, terms)), (node, (rows, 96))):
        each.meta["val"] = torch.empty(size, dtype=torch.float16, device="meta")
    work = least.of_node(node)
    assert work is not None
    return work


@pytest.mark.parametrize("of_norm", [False, True])
def test_bytes_of_a_linear_layer_in_8_bits(of_norm: bool) -> None:
    work = of_linear(256, 128, of_norm)
    x, weight, out = 256 * 128, 96 * 128, 2 * 256 * 96
    # a weight is read in both, activations are written in 8 bits by what reads them in half precision, or by the norm
    assert work.bytes_in_8 == x + 3 * weight + out + (0 if of_norm else 3 * x)
    card = Card(86, 1, 1.0, 1e6)  # 2.048 TOP/s
    assert least.milliseconds([work], card, eight_bits=True)["linear"] == pytest.approx(work.flops / 2.048e9)
    assert least.milliseconds([work], card)["linear"] == pytest.approx(4 * work.flops / 2.048e9)


@pytest.mark.parametrize(("rows", "terms"), [(255, 128), (256, 96)])
def test_products_that_stay_in_half_precision(rows: int, terms: int) -> None:
    work = of_linear(rows, terms, False)
    assert not work.bytes_in_8
    card = Card(86, 1, 1.0, 1e6)
    assert least.milliseconds([work], card, eight_bits=True) == least.milliseconds([work], card)


def test_the_page_keeps_its_words(tmp_path) -> None:
    file = tmp_path / "cards.md"
    file.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    ways = {"exact": 2.0, "faster": 1.0, "eight_bits": 0.5, "both": 0.25}
    times = {name: {way: {"linear": ms} for way, ms in ways.items()} for name in CARDS}
    case = {"case": "sd15:512x512", "kinds": {"linear": {"nodes": 3, "gflop": 1.0, "gb": 0.1}}, "cards": times}
    row = {"kernel": "mma_gemm", "what": "linear", "capability": 86, **loops.Loop(5, 1, 1, 1, 1)._asdict()}
    row |= {"clocks": 48, "useful": 1.0, "at_most": 0.91}
    page.write({"cases": [case], "kernels": [row, {**row, "capability": 89}]}, file)
    text = file.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    # a loop that is the same on two cards has one row
    assert "| `mma_gemm` | linear | 8.6, 8.9 | 5 | 1/1/0 | 1 | 1 | 48 | 91 % |" in text
    assert "| GeForce RTX 3060 | **2.0** | 1.0 | 0.5 | 0.2 | 2.0 | 0.0 |" in text
