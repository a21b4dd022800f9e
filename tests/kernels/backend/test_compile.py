"""Compiles every kernel for real cards, which needs none: the interpreter knows no types and no vectors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pairs import every

from benchmarks.compile_table import compiler as triton_compiler
from kernels import compiled
from sfast_ext import kernels
from sfast_ext.kernels.attention import short_attention
from sfast_ext.kernels.backend import trial, triton_runtime
from sfast_ext.kernels.conv import narrow_conv, upsample, upsample_conv2d
from sfast_ext.kernels.group_norm import fused_inputs, group_norm, one_pass, two_pass
from sfast_ext.kernels.pointwise import bias_add, geglu, layer_norm, timestep_embedding

pytestmark = pytest.mark.skipif(
    not triton_runtime.AVAILABLE or kernels.interpreted(), reason="needs Triton, and TRITON_INTERPRET unset"
)

NORM = {"ADD": False, "HAS_SHIFT": False, "HAS_POST_BIAS": False, "HAS_WEIGHT": True, "HAS_BIAS": True}
NORM |= {"ROWS": 2, "BLOCK": 1024}
GROUPS = {"WIDTH": 120, "BLOCK": 128, "GROUPS": 16, "PIXELS": 32}
PARTS = {"UNIT": 4, "BLOCK": 64, "GROUPS": 8, "PIXELS": 128}
SUM, JOIN = {"JOIN": False, "RESIDUAL": True}, {"JOIN": True, "RESIDUAL": False}
KERNELS = {
    "layer_norm": (layer_norm.layer_norm_kernel, NORM),
    "add_layer_norm": (
        layer_norm.layer_norm_kernel,
        {**NORM, "ADD": True, "HAS_SHIFT": True, "HAS_POST_BIAS": True},
    ),
    "geglu": (geglu.geglu_kernel, {"GATE_FIRST": False, "TANH": False, "ROWS": 8, "BLOCK": 256}),
    "geglu_tanh": (geglu.geglu_kernel, {"GATE_FIRST": True, "TANH": True, "ROWS": 8, "BLOCK": 256}),
    "bias_add": (bias_add.bias_add_kernel, {"HAS_BIAS": True, "HAS_RESIDUAL": True, "ROWS": 16, "BLOCK": 128}),
    "group_norm_statistics": (group_norm.group_norm_looped_statistics_kernel, GROUPS),
    "group_norm_whole": (one_pass.group_norm_one_pass_kernel, {"UNIT": 4, "BLOCK": 64, "PIXELS": 64}),
    "group_norm_part_statistics": (one_pass.group_norm_part_statistics_kernel, PARTS),
    "add_group_norm_whole": (
        fused_inputs.fused_group_norm_one_pass_kernel,
        {**SUM, "UNIT": 4, "BLOCK": 64, "PIXELS": 64},
    ),
    "cat_group_norm_whole": (
        fused_inputs.fused_group_norm_one_pass_kernel,
        {**JOIN, "UNIT": 4, "BLOCK": 64, "PIXELS": 64},
    ),
    "add_group_norm_part_statistics": (fused_inputs.fused_group_norm_part_statistics_kernel, {**SUM, **PARTS}),
    "cat_group_norm_part_statistics": (fused_inputs.fused_group_norm_part_statistics_kernel, {**JOIN, **PARTS}),
    "upsample": (upsample.upsample_kernel, {"RESIDUAL": False, "ROWS": 16, "BLOCK": 64}),
    "upsample_of_a_sum": (upsample.upsample_kernel, {"RESIDUAL": True, "ROWS": 16, "BLOCK": 64}),
    "group_norm_by_parts": (
        two_pass.group_norm_normalise_kernel,
        {"BLOCK": 64, "GROUPS": 8, "PIXELS": 64, "PARTS": 32},
    ),
    "upsample_conv2d": (upsample_conv2d.upsample_conv2d_kernel, {"DOWN": 2, "ACROSS": 4, "BLOCK": 64}),
}
POINTERS = {
    "x",
    "post_bias",
    "a",
    "b",
    "conv_bias",
    "residual",
    "shift",
    "weight",
    "bias",
    "out",
    "out_sum",
    "tap_results",
}
STATISTICS = {"partial", "combined"}
MULTIPLES = {"columns", "channels", "first", "half"}  # of 16, in every Stable Diffusion UNet
FLOATS = {"eps", "scale", "step_x", "step_y"}
# without Triton all of it is skipped, and has names all the same
VERSION = triton_compiler.version() if triton_runtime.AVAILABLE else (3, 0)
CAPABILITIES = triton_compiler.capabilities(VERSION)
# of which some instructions are known: older versions of Triton have other ways to the same end
KNOWN = VERSION >= (3, 3)
SCALAR = "a thread moves less than 16 bytes at once: is the size that divides by 16 in MULTIPLES, and no flat count?"


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiled.TRITON))


def _in_order(ptx, early):
    """`ptx`, in which a kernel that begins early waits before it reads or writes anything, and no other waits."""
    said = re.findall(r"griddepcontrol\.\w+|(?:ld|st|red|atom|cp)\.\S*(?:global|async)\S*|\bret;", ptx)
    assert said[:2] == ["griddepcontrol.launch_dependents", "griddepcontrol.wait"] if early else True
    assert sum(word.startswith("griddepcontrol") for word in said) == 2 * early
    # before any branch: a program that ended without waiting would have ended before those in front
    assert not early or not re.search(r"\bbra\b", ptx.partition("griddepcontrol.wait")[0])
    return ptx


def _compile(kernel, constants, capability, dtype):
    operands = dict.fromkeys(POINTERS, dtype) | dict.fromkeys(STATISTICS, "*fp32")
    return _ptx(kernel, constants, operands, capability)


def _ptx(kernel, constants, operands, capability):
    """The PTX of a kernel that fits the card; `operands` are the types of its arguments that are no "i32"."""
    types = {name: operands.get(name, "fp32" if name in FLOATS else "i32") for name in kernel.arg_names}
    divisible = {name for name in types if types[name][0] == "*" or name in MULTIPLES or name.endswith("_row")}
    ptx, shared = triton_compiler.compiled(kernel, types, constants, capability, divisible)
    assert shared <= triton_compiler.SHARED[capability]
    return _in_order(ptx, triton_compiler.pdl_enabled(capability))


def _words(name):
    """Of an access: half of what it could be if blocks of groups are multiples of 4 channels, not of 8, and if
    tiles are small so that more of what lies beside a pixel is still in a cache."""
    return 2 if "UNIT" in KERNELS[name][1] or name == "upsample_conv2d" else 4


# the oldest card, the first whose programs begin early, and the newest, which has no more shared memory than any other;
# for each card between them `make compile-table` compiles
FAR_APART = sorted({CAPABILITIES[0], 90, CAPABILITIES[-1]})
# float16 at an end, and of every second kernel another type between the ends
COMPILATIONS = [(name, CAPABILITIES[-(number % 2)]) for number, name in enumerate(KERNELS)]
OTHERS = every(2, *((name, ("*bf16", "*fp32")[number // 2 % 2]) for number, name in enumerate(KERNELS)))


@pytest.mark.parametrize(("name", "capability"), COMPILATIONS)
def test_compiles(name, capability):
    ptx = _compile(*KERNELS[name], capability, "*fp16")
    # whole tiles move 16 bytes a thread and access
    words = _words(name)
    assert not KNOWN or re.search(rf"ld\.global\S*\.v{words}\.b32", ptx), SCALAR
    assert not KNOWN or name.endswith("statistics") or re.search(rf"st\.global\S*\.v{words}\.b32", ptx)


@pytest.mark.long(but=[0, 3, 5, 6])
@pytest.mark.parametrize(("name", "dtype"), OTHERS)
def test_compiles_other_dtypes(name, dtype):
    words = 4 if dtype == "*fp32" else _words(name)
    ptx = _compile(*KERNELS[name], 90, dtype)
    assert not KNOWN or f".v{words}.b32" in ptx, SCALAR


@pytest.mark.parametrize("capability", FAR_APART)
def test_combining_statistics_compiles(capability):
    assert "st.global" in _compile(two_pass.group_norm_combine_kernel, {"PARTS": 128, "GROUPS": 8}, capability, "*fp16")


@pytest.mark.parametrize("capability", FAR_APART)
def test_what_is_tried_compiles(capability):
    assert "st.global" in _ptx(trial.trial_kernel, {}, {"out": "*i32"}, capability)


@pytest.mark.parametrize("capability", FAR_APART)
def test_timestep_embedding_compiles(capability):
    operands = {"t": "*i64", "frequency": "*fp32", "out": "*fp16"}
    constants = {"SINE_FIRST": True, "BLOCK": timestep_embedding._BLOCK}
    ptx = _ptx(timestep_embedding.timestep_embedding_kernel, constants, operands, capability)
    # an angle may be a thousand: the instructions for small ones are far off
    assert "sin.approx" not in ptx and "cos.approx" not in ptx


@pytest.mark.long(but=[1, 3, 4])
@pytest.mark.parametrize(
    ("blocks", "dtype", "capability"),
    [((40, 32, 16, 64, 16), "fp16", each) for each in FAR_APART if triton_compiler.compiles_mma(VERSION, each)]
    + [((64, 64, 0, 64, 16), "bf16", 90), ((160, 128, 32, 64, 16), "fp16", 90)],
    ids=str,
)
def test_short_attention_compiles(blocks, dtype, capability):
    constants = dict(zip(("SIZE", "SIZE_A", "SIZE_B", "KEYS_A", "KEYS_B"), blocks))
    constants |= {"ROWS": short_attention._ROWS, "num_warps": short_attention._WARPS, "num_stages": 1}
    pointers = dict.fromkeys(("out", "q", "k", "v"), f"*{dtype}")
    ptx = _ptx(short_attention.short_attention_kernel, constants, pointers, capability)
    # of Turing's matrix instructions newer versions of Triton know nothing
    assert capability == 75 or _products(capability) in ptx


def _products(capability):
    return "wgmma.mma_async" if capability == 90 and KNOWN else "mma"


NARROW = {
    "narrow_conv_in_kernel": {"HAS_BIAS": True, "CHANNELS": 4, "PIXELS": 128, "DEPTH": 64, "COLUMNS": 64},
    "narrow_conv_taps_kernel": {"CHANNELS": 4, "TAPS": 64, "ROWS": 128, "DEPTH": 64},
    "narrow_conv_out_kernel": {"HAS_BIAS": True, "CHANNELS": 4, "PIXELS": 256},
}


@pytest.mark.long(but=[0, 4, 8])
@pytest.mark.parametrize(("dtype", "capability"), [("bf16", 80), ("fp16", 90), ("fp16", CAPABILITIES[-1])])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_conv_compiles(name, capability, dtype):
    pointers = dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}") | {"taps": "*fp32"}
    if name == "narrow_conv_taps_kernel":
        pointers["out"] = "*fp32"
    ptx = _ptx(getattr(narrow_conv, name), NARROW[name] | {"num_stages": 1}, pointers, capability)
    assert name == "narrow_conv_out_kernel" or _products(capability) in ptx


COMPILED = [
    *(kernel for kernel, _ in KERNELS.values()),
    *(getattr(narrow_conv, name) for name in NARROW),
    *(
        two_pass.group_norm_combine_kernel,
        timestep_embedding.timestep_embedding_kernel,
        short_attention.short_attention_kernel,
        trial.trial_kernel,
    ),
]


@pytest.mark.parametrize("home", sorted(Path(kernels.__file__).parent.rglob("*.py")), ids=lambda home: home.stem)
def test_every_kernel_waits_in_its_first_statement(home):
    text = home.read_text()
    kernels_of = text.count("do_not_specialize=[")  # helpers of kernels are without
    assert len(re.findall(r"PDL: constexpr,?\s*\):(?:  # fmt: skip)?\n    pdl_wait\(PDL\)\n", text)) == kernels_of
    assert home.stem not in ("one_pass", "short_attention", "timestep_embedding") or kernels_of
