"""The profile on a tiny UNet. A stand-in for the GPU launches a kernel for each operation of torch on the CPU."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.profile import kinds
from benchmarks.profile import page as profile_page
from benchmarks.profile import run as profile
from sfast_ext.kernels.backend import triton_runtime
from sfast_ext.tools.lib import trace

CPU = torch.device("cpu")
LEAF = "leaf "


class StandIn:
    """Records as `trace.record` does, and adds what a GPU would have run: it lags behind the CPU by a while."""

    def __init__(self, *, extra_in_replays: int = 0, in_replays: float = 0.1):
        self._record = trace.record
        self.extra = extra_in_replays
        self.durations = {"replays": in_replays, "nodes": 1.1}  # that tell a replay from the run by nodes

    def __call__(self, calls, device):
        events = self._record({name: leaves_of(call) for name, call in calls.items()}, device)
        operations = [e for e in events if e.name.startswith(LEAF)]
        result = list(events)
        for number, name in enumerate(calls):
            own = next(e for e in events if e.category == trace.RANGE and e.name == f"call {name}")
            leaves = [e for e in operations if own.start <= e.start <= own.end]
            leaves += leaves[-1:] * (self.extra if name == "replays" else 0)
            for i, leaf in enumerate(leaves):
                at = (number, i)
                result.append(trace.Event("launch", "cuda_runtime", leaf.start, leaf.duration, correlation=at))
                begin = own.start + 0.2 * i  # so that all lie in the call's range
                result.append(trace.Event(leaf.name, trace.KERNEL, begin, self.durations[name], correlation=at))
        return sorted(result, key=lambda e: e.start)


class Leaves(TorchDispatchMode):
    """Each operation in a range of its own: an older torch tells times in whole microseconds, not what lies in what."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "profiler":
            return func(*args, **(kwargs or {}))
        with record_function(f"{LEAF}{func}"):
            return func(*args, **(kwargs or {}))


def leaves_of(call):
    def run():
        with Leaves():
            call()

    return run


@pytest.fixture(autouse=True)
def few_times(monkeypatch):
    """As few as a median is of; the stand-in takes the same time in all."""
    monkeypatch.setattr(profile, "REPLAYS", 3)
    monkeypatch.setattr(profile, "ROUNDS", 1)


@pytest.mark.long(but=[1])
@pytest.mark.parametrize("model", ["tiny-sd15", "tiny-sdxl"])
def test_a_tiny_unet_by_kinds(model, monkeypatch, kernels_on_the_cpu):
    monkeypatch.setattr(profile.trace, "record", StandIn())
    found = profile.measure(model, 64, 64, 1, CPU)
    json.dumps(found)
    rows = {row["kind"]: row for row in found["kinds"]}
    assert set(kinds.KINDS) - {"residual and bias"} <= set(rows) <= set(kinds.KINDS)
    assert found["durations_from"] == f"the median of {profile.REPLAYS - 1} replays"
    assert found["kernels_renamed_in_the_replay"] == 0
    assert found["attributed_by"]["launch"] == sum(row["kernels"] for row in rows.values())
    assert found["launched"]["by_nodes"] == found["launched"]["by_a_replay"]
    total = sum(row["ms"] for row in rows.values())
    assert total == pytest.approx(found["kernels_ms"], rel=1e-3)
    assert found["gaps_ms"] == pytest.approx(found["span_ms"] - found["kernels_ms"], abs=1e-3)
    assert not found["kernels_overlap"] and "between kernels" in profile_page.section(found)
    for name in ("convolution", "linear", "attention"):
        assert rows[name]["gflop"] > 0 and "TFLOP/s" in rows[name]["ceiling"]
    for name in ("group norm", "layer norm", "GEGLU"):
        assert rows[name]["gflop"] == 0 and rows[name]["gb"] > 0 and "TB/s" in rows[name]["ceiling"]
    operations = {row["operation"] for row in found["operations"]}
    assert {"linear", "add_layer_norm"} <= operations
    assert len(found["kernels"]) <= profile.TOP and found["kernels"][0]["ms"] >= found["kernels"][-1]["ms"]
    # counted node by node and in the forward as a whole, where the CPU's attention is counted by an older torch alone
    flops = profile.rates.flops(forward(model))
    x = torch.ones(1, 1, 2, 2)
    counted = profile.rates.flops(lambda: F.scaled_dot_product_attention(x, x, x)) > 0
    attention = 0 if counted else round(1e9 * rows["attention"]["gflop"])
    assert found["flops"] - attention == pytest.approx(flops, rel=0.05)


def forward(model):
    unet = profile.models.random_unet(model)
    args, kwargs = profile.models.unet_inputs(unet, 64, 64, 1)
    return lambda: unet(*args, **kwargs)


def test_where_the_replay_launches_something_else_the_run_by_nodes_is_taken(monkeypatch, two_levels):
    monkeypatch.setattr(profile.trace, "record", StandIn(extra_in_replays=profile.REPLAYS))
    found = profile.measure("tiny-sd15", 64, 64, 1, CPU)
    assert found["durations_from"] == "the run by nodes"
    by_replay, by_nodes = found["launched"]["by_a_replay"][0], found["launched"]["by_nodes"][0]
    assert by_replay == by_nodes + 1
    assert "Times from the run by nodes" in profile_page.section(found)


def test_where_kernels_of_a_replay_overlap_the_run_by_nodes_is_taken(monkeypatch, two_levels):
    monkeypatch.setattr(profile.trace, "record", StandIn(in_replays=0.5))
    found = profile.measure("tiny-sd15", 64, 64, 1, CPU)
    kernels = found["launched"]["by_nodes"][0]
    assert found["kernels_overlap"] and found["durations_from"] == "the run by nodes"
    # they begin 0.2 us apart: each counts from the end of the one in front
    assert sum(row["ms"] for row in found["kinds"]) == pytest.approx(1e-3 * (1.1 + 0.2 * (kernels - 1)), rel=0.01)
    words = profile_page.section(found)
    assert "begin before the one in front has ended" in words and "between kernels" not in words


def test_a_kernel_that_ends_within_the_one_in_front_takes_nothing(monkeypatch, two_levels):
    stand_in = StandIn(in_replays=0.5)
    stand_in.durations["nodes"] = 0.0
    monkeypatch.setattr(profile.trace, "record", stand_in)
    found = profile.measure("tiny-sd15", 64, 64, 1, CPU)
    assert {row["ms"] for row in found["kinds"]} == {0.0} == {row["tflops"] for row in found["operations"]}
    assert "0 TFLOP/s" in profile_page.section(found)


def test_kernels_of_no_node_have_a_row_of_their_own(monkeypatch, two_levels):
    monkeypatch.setattr(profile.trace, "attribute", lambda events, launched, prefix: ([None] * len(launched), {}))
    monkeypatch.setattr(profile.trace, "record", StandIn())
    found = profile.measure("tiny-sd15", 64, 64, 1, CPU)
    assert [row["kind"] for row in found["kinds"]] == [profile.LOST]
    assert profile.LOST in profile_page.section(found)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("conv2d", "convolution"),
        ("conv_group_norm", "convolution"),
        ("upsample_conv2d", "convolution"),
        ("convolution", "convolution"),
        ("linear", "linear"),
        ("linear_geglu", "linear"),
        ("linear_layer_norm", "linear"),
        ("linear_accumulate", "linear"),
        ("addmm", "linear"),
        ("baddbmm", "linear"),
        ("scaled_dot_product_attention", "attention"),
        ("cross_attention", "attention"),
        ("query_attention", "attention"),
        ("group_norm", "group norm"),
        ("cat_group_norm", "group norm"),
        ("native_layer_norm", "layer norm"),
        ("add_layer_norm", "layer norm"),
        ("geglu", "GEGLU"),
        ("bias_add", "residual and bias"),
        ("add", "residual and bias"),
        ("convert_element_type", kinds.OTHER),
        ("reshape", kinds.OTHER),
        ("upsample_nearest2d", kinds.OTHER),
        ("cat", kinds.OTHER),
    ],
)
def test_kinds_by_name(name, kind):
    assert kinds.kind(name) == kind


def test_what_a_node_costs():
    from sfast_ext.kernels.attention import query_attention
    from sfast_ext.kernels.conv import conv2d, upsample_conv2d
    from sfast_ext.kernels.group_norm import conv_group_norm
    from sfast_ext.kernels.linear import linear_accumulate, linear_layer_norm

    x, weight, residual = torch.randn(4, 6), torch.randn(8, 6), torch.randn(4, 8)
    found = kinds.cost(linear_accumulate.launch, (x, weight, residual), {}, residual)
    assert found == ("linear_accumulate", "linear", "4×6, 8×6, 4×8", 2 * 4 * 6 * 8, 4 * (24 + 48 + 32 + 32))
    # with a vector each for bias, factor, offset and what comes after, a second result, and records
    vectors, records = [torch.randn(8) for _ in range(4)], torch.zeros(5, dtype=torch.int64)
    args = (x, weight, vectors[0], residual, *vectors[1:3], 1e-5, vectors[3], records)
    normed = kinds.cost(linear_layer_norm.launch, args, {}, (residual, torch.randn(4, 8)))
    assert normed == ("linear_layer_norm", "linear", *found[2:4], found.bytes + 4 * (4 * 8 + 32) + 8 * 5)
    wide = torch.randn(1, 6).expand(4, 6)
    total = kinds.cost(torch.ops.aten.add.Tensor, (wide, wide), {}, x)
    assert total == ("add", "residual and bias", "4×6, 4×6", 0, 4 * (6 + 24))
    image, weight, out = torch.randn(2, 3, 4, 5), torch.randn(7, 3, 3, 3), torch.randn(2, 7, 4, 5)
    found = kinds.cost(conv2d.launch, (image, weight), {}, out)
    flops = 2 * 2 * 4 * 5 * 7 * 3 * 9
    assert found == ("conv2d", "convolution", "2×3×4×5, 7×3×3×3", flops, 4 * (120 + 189 + 280))
    normed = kinds.cost(conv_group_norm.launch, (image, weight, None, None, 7, None, None, 1e-5), {}, (None, out))
    assert normed == ("conv_group_norm", *found[1:])
    enlarged = kinds.cost(upsample_conv2d.launch, (image, weight, (1, 0)), {}, torch.randn(2, 7, 7, 10))
    # what a small image makes, a quarter of what the large one would
    assert enlarged == ("upsample_conv2d", *found[1:4], 4 * (120 + 189 + 980))
    x, weight, both, out = torch.randn(2, 6, 24), torch.randn(32, 24), torch.randn(2, 5, 64), torch.randn(2, 4, 6, 8)
    k, v = both.unflatten(-1, (2, 4, 8)).transpose(1, 3).unbind(2)
    found = kinds.cost(query_attention.launch, (x, weight, k, v), {"scale": 0.3}, out)
    flops = 2 * 12 * 24 * 32 + 2 * 2 * 2 * 4 * 6 * 5 * 8  # of the product, and of the two of the attention
    moved = 4 * (x.numel() + weight.numel() + both.numel() + out.numel())
    assert found == ("query_attention", "attention", "2×6×24, 32×24, 2×4×5×8, 2×4×5×8", flops, moved)


def test_the_page_keeps_the_words_around_its_tables(tmp_path, monkeypatch, two_levels):
    monkeypatch.setattr(profile.trace, "record", StandIn())
    found = profile.measure("tiny-sd15", 64, 64, 1, CPU)
    page, file = tmp_path / "profile.md", tmp_path / "profile.json"
    file.write_text(json.dumps(found))
    monkeypatch.setattr(profile_page, "PAGE", page)
    monkeypatch.setattr(profile_page.write, "__defaults__", (page,))
    assert profile.main(["--page", str(file)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Where the time") and "## tiny-sd15, 64×64" in text and "| convolution |" in text
    words = text.replace("## tiny-sd15, 64×64\n", "## tiny-sd15, 64×64\n\nWords of a person.\n")
    page.write_text(words, encoding="utf-8")
    profile_page.write([{**found, "call_ms": 123.0}, {**found, "images": 4}], page)
    text = page.read_text(encoding="utf-8")
    assert "Words of a person." in text and "A call takes 123.00 ms" in text
    assert text.count("## ") == 2 and text.index("64×64, 4 images") > text.index("Words")


@pytest.mark.long
def test_the_plan_of_a_card_without_triton(monkeypatch, tmp_path):
    monkeypatch.setattr(profile.trace, "record", StandIn())
    seen = []

    def costs(subject):
        seen.append((triton_runtime.capability(torch.device("cuda", 0)), subject.plan._triton))
        return original(subject)

    original = profile.Subject.costs
    monkeypatch.setattr(profile.Subject, "costs", costs)
    monkeypatch.setattr(profile.ways, "check_card", lambda capability, device: None)
    asked = ["--model", "tiny-sd15", "--size", "64x64", "--as", "sm_89", "--without", "triton", "--json"]
    monkeypatch.setattr(profile.machine, "device", lambda: CPU)
    assert profile.main([*asked, str(tmp_path / "x.json")]) == 1  # a CPU is no GPU
    way = profile.ways.Way("sfast", triton=False, capability=(8, 9))
    found = profile.measure("tiny-sd15", 64, 64, 1, CPU, way)
    assert seen == [((8, 9), False)] and (found["as"], found["without"]) == ("sm_89", ["triton"])
    assert profile_page.title(found) == "tiny-sd15, 64×64, without Triton, as sm_89"


def test_a_profile_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(profile.machine, "device", lambda: CPU)
    assert profile.main(["--model", "tiny-sd15"]) == 1
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
