"""Compiles every kernel for real cards, which needs none: the interpreter knows no types and no vectors."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from sfast_ext import kernels
from sfast_ext.kernels import (
    _group_norm,
    _group_parts,
    _sum_group_norm,
    _triton,
    add_layer_norm,
    bias_add,
    geglu,
    group_norm,
    layer_norm,
    narrow_conv,
    short_attention,
    timestep_embedding,
    upsample,
    upsample_conv2d,
)

pytestmark = pytest.mark.skipif(
    not _triton.AVAILABLE or kernels.interpreted(), reason="needs Triton, and TRITON_INTERPRET unset"
)

NORM = {"HAS_WEIGHT": True, "HAS_BIAS": True, "ROWS": 2, "BLOCK": 1024}
GROUPS = {"WIDTH": 120, "BLOCK": 128, "GROUPS": 16, "PIXELS": 32}
PARTS = {"UNIT": 4, "BLOCK": 64, "GROUPS": 8, "PIXELS": 128}
SUM, JOIN = {"JOIN": False, "RESIDUAL": True}, {"JOIN": True, "RESIDUAL": False}
KERNELS = {
    "layer_norm": (layer_norm._kernel, NORM),
    "add_layer_norm": (add_layer_norm._kernel, {**NORM, "HAS_SHIFT": True, "HAS_AFTER": True}),
    "geglu": (geglu._kernel, {"GATE_FIRST": False, "TANH": False, "ROWS": 8, "BLOCK": 256}),
    "geglu_tanh": (geglu._kernel, {"GATE_FIRST": True, "TANH": True, "ROWS": 8, "BLOCK": 256}),
    "bias_add": (bias_add._kernel, {"HAS_BIAS": True, "HAS_RESIDUAL": True, "ROWS": 16, "BLOCK": 128}),
    "group_norm_statistics": (group_norm._statistics, GROUPS),
    "group_norm_whole": (_group_norm._whole, {"UNIT": 4, "BLOCK": 64, "PIXELS": 64}),
    "group_norm_part_statistics": (_group_norm._part_statistics, PARTS),
    "add_group_norm_whole": (_sum_group_norm._whole, {**SUM, "UNIT": 4, "BLOCK": 64, "PIXELS": 64}),
    "cat_group_norm_whole": (_sum_group_norm._whole, {**JOIN, "UNIT": 4, "BLOCK": 64, "PIXELS": 64}),
    "add_group_norm_part_statistics": (_sum_group_norm._part_statistics, {**SUM, **PARTS}),
    "cat_group_norm_part_statistics": (_sum_group_norm._part_statistics, {**JOIN, **PARTS}),
    "upsample": (upsample._kernel, {"RESIDUAL": False, "ROWS": 16, "BLOCK": 64}),
    "upsample_of_a_sum": (upsample._kernel, {"RESIDUAL": True, "ROWS": 16, "BLOCK": 64}),
    "group_norm_by_parts": (_group_parts._normalise, {"BLOCK": 64, "GROUPS": 8, "PIXELS": 64, "PARTS": 32}),
    "upsample_conv2d": (upsample_conv2d._kernel, {"DOWN": 2, "ACROSS": 4, "BLOCK": 64}),
}
POINTERS = {"x", "after", "a", "b", "term", "residual", "shift", "weight", "bias", "out", "total", "products"}
STATISTICS = {"partial", "combined"}
MULTIPLES = {"columns", "channels", "first", "half"}  # of 16, in every Stable Diffusion UNet


def _early(capability):
    """Whether kernels are compiled to begin early, as on such a GPU, and the options that go with it."""
    early = _triton.HAS_EARLY and capability >= 90
    return early, {"launch_pdl": True} if early else {}


def _in_order(ptx, early):
    """`ptx`, in which a kernel that begins early waits before it reads or writes anything, and no other waits."""
    said = re.findall(r"griddepcontrol\.\w+|(?:ld|st|red|atom|cp)\.\S*(?:global|async)\S*|\bret;", ptx)
    assert said[:2] == ["griddepcontrol.launch_dependents", "griddepcontrol.wait"] if early else True
    assert sum(word.startswith("griddepcontrol") for word in said) == 2 * early
    # before any branch: a program that ended without waiting would have ended before those in front
    assert not early or not re.search(r"\bbra\b", ptx.partition("griddepcontrol.wait")[0])
    return ptx


def _compile(kernel, constants, capability, dtype):
    early, options = _early(capability)
    constants = {**constants, "EARLY": early}
    compiler = pytest.importorskip("triton.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in POINTERS | STATISTICS:
            signature[name] = "*fp32" if name in STATISTICS else dtype
        else:
            signature[name] = "fp32" if name in ("eps", "scale", "step_x", "step_y") else "i32"
        if name in POINTERS | STATISTICS | MULTIPLES:
            attributes[(index,)] = [["tt.divisibility", 16]]
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    try:
        source = compiler.ASTSource(kernel, signature, places, attributes)
    except Exception as exc:
        pytest.skip(f"this Triton describes a kernel in another way: {exc}")
    return _in_order(compiler.compile(source, target=target, options=options).asm["ptx"], early)


def _words(name):
    """Of an access: half of what it could be where blocks of groups are multiples of 4 channels, not of 8, and where
    tiles are small so that more of what lies beside a pixel is still in a cache."""
    return 2 if "UNIT" in KERNELS[name][1] or name == "upsample_conv2d" else 4


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 120])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name, capability, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = _compile(*KERNELS[name], capability, "*fp16")
    # whole tiles move 16 bytes a thread and access
    words = _words(name)
    assert re.search(rf"ld\.global\S*\.v{words}\.b32", ptx)
    assert name.endswith("statistics") or re.search(rf"st\.global\S*\.v{words}\.b32", ptx)


@pytest.mark.parametrize("dtype", ["*bf16", "*fp32"])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_other_dtypes(name, dtype, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    words = 4 if dtype == "*fp32" else _words(name)
    assert f".v{words}.b32" in _compile(*KERNELS[name], 90, dtype)


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 120])
def test_combining_statistics_compiles(capability, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert "st.global" in _compile(_group_parts._combine, {"PARTS": 128, "GROUPS": 8}, capability, "*fp16")


@pytest.mark.parametrize("capability", [75, 90, 120])
def test_timestep_embedding_compiles(capability, monkeypatch, tmp_path):
    operands = {"t": "*i64", "frequency": "*fp32", "out": "*fp16"}
    constants = {"SINE_FIRST": True, "BLOCK": timestep_embedding._BLOCK}
    ptx = _ptx(timestep_embedding, constants, operands, capability, monkeypatch, tmp_path)
    # an angle may be a thousand: the instructions for small ones are far off
    assert "sin.approx" not in ptx and "cos.approx" not in ptx


@pytest.mark.parametrize(
    ("blocks", "dtype", "capability"),
    [((40, 32, 16, 64, 16), "fp16", capability) for capability in (75, 80, 86, 89, 90, 120)]
    + [((64, 64, 0, 64, 16), "bf16", 90), ((160, 128, 32, 64, 16), "fp16", 90)],
    ids=str,
)
def test_short_attention_compiles(blocks, dtype, capability, monkeypatch, tmp_path):
    if capability == 75 and tuple(map(int, _triton.triton.__version__.split(".")[:2])) < (3, 4):
        pytest.skip("Triton before 3.4 fails at these products for Turing, where the kernel is not launched")
    constants = dict(zip(("SIZE", "SIZE_A", "SIZE_B", "KEYS_A", "KEYS_B"), blocks)) | {"ROWS": short_attention._ROWS}
    pointers = dict.fromkeys(("out", "q", "k", "v"), f"*{dtype}")
    ptx = _ptx(short_attention, constants, pointers, capability, monkeypatch, tmp_path)
    # of Turing's matrix instructions newer versions of Triton know nothing
    assert capability == 75 or ("wgmma.mma_async" if capability == 90 else "mma.sync") in ptx


NARROW = {
    "_from_few": {"HAS_BIAS": True, "CHANNELS": 4, "PIXELS": 128, "DEPTH": 64, "COLUMNS": 64},
    "_taps": {"CHANNELS": 4, "TAPS": 64, "ROWS": 128, "DEPTH": 64},
    "_to_few": {"HAS_BIAS": True, "CHANNELS": 4, "PIXELS": 256},
}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_conv_compiles(name, capability, dtype, monkeypatch, tmp_path):
    pointers = dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}") | {"taps": "*fp32"}
    if name == "_taps":
        pointers["out"] = "*fp32"
    kernel = getattr(narrow_conv, name)
    given = {key: kind for key, kind in pointers.items() if key in kernel.arg_names}
    ptx = _ptx(SimpleNamespace(_kernel=kernel), NARROW[name], given, capability, monkeypatch, tmp_path)
    assert name == "_to_few" or ("wgmma.mma_async" if capability == 90 else "mma.sync") in ptx


def _ptx(module, constants, operands, capability, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiler = pytest.importorskip("triton.compiler")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    names = module._kernel.arg_names
    early, launch = _early(capability)
    constants = constants | {"EARLY": early}
    signature = {name: "constexpr" if name in constants else "i32" for name in names} | operands
    signature |= {"scale": "fp32"} if "scale" in names else {}
    places = {(names.index(name),): value for name, value in constants.items()}
    aligned = [name for name in names if name in operands and signature[name][0] == "*" or name.endswith("_row")]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    try:
        source = compiler.ASTSource(module._kernel, signature, places, attributes)
    except Exception as exc:
        pytest.skip(f"this Triton describes a kernel in another way: {exc}")
    options = {"num_warps": getattr(module, "_WARPS", 4), "num_stages": getattr(module, "_STAGES", 1)} | launch
    return _in_order(compiler.compile(source, target=target, options=options).asm["ptx"], early)


@pytest.mark.parametrize("home", sorted(Path(_triton.__file__).parent.glob("*.py")), ids=lambda home: home.stem)
def test_every_kernel_waits_in_its_first_statement(home):
    text = home.read_text()
    kernels_of = text.count("do_not_specialize=[")  # helpers of kernels are without
    assert len(re.findall(r"EARLY: constexpr,?\s*\):\n    begin_early\(EARLY\)\n", text)) == kernels_of
    assert home.stem not in ("_group_norm", "short_attention", "timestep_embedding") or kernels_of
