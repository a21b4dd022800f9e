"""Attention of flash_attn and SageAttention: one operation, which calls the library."""

from __future__ import annotations

import sys

import pytest
import torch
from foreign import CPU, Layer, X, both_ways, captured, live, ops, refused, sdpa
from passes.networks import network
from torch.nn import functional as F

from sfast_ext import Config, accelerate
from sfast_ext.call_signature import flatten_call
from sfast_ext.capture import opaque
from sfast_ext.capture.capture import capture
from sfast_ext.passes.rewrite import is_pure
from sfast_ext.runtime.verify import relative_error
from sfast_ext.weights.arena import WeightArena

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def by_flash(**options):
    def attend(q, k, v):
        from flash_attn import flash_attn_func

        return flash_attn_func(q, k, v, **options)

    return attend


def packed(q, k, v):
    from flash_attn import flash_attn_qkvpacked_func

    return flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), causal=True)


def keys_packed(q, k, v):
    from flash_attn import flash_attn_kvpacked_func

    return flash_attn_kvpacked_func(q, torch.stack([k, v], 2), 0.0, 0.5)


FLASH = {
    "func": by_flash(),
    "causal, scaled": by_flash(causal=True, softmax_scale=0.2, dropout_p=0.0),
    "qkvpacked": packed,
    "kvpacked": keys_packed,
}


def one_operation(attend, calls):
    """The plan of a layer calls the library's own function, once a run, and all around it is accelerated."""
    module = Layer(attend)
    forward, expected = module.forward, module(X)
    found = captured(attend)
    (node,) = [n for n in found.graph_module.graph.nodes if n.target is opaque.OPERATOR]
    assert is_pure(node)
    accelerator = accelerate(module, Config(allow_cpu=True, drop_slower=False, check="always"))
    module(X)
    (plan,) = accelerator.plans.values()
    calls.clear()
    outputs = plan.run_eagerly([X])
    assert len(calls) >= 1
    # nobody else's attention would be as near
    assert (outputs[0] - expected).abs().max() < 1e-6
    assert (Layer(sdpa)(X) - expected).abs().max() > 1e-5
    assert plan.error < 1e-6
    other = torch.randn(3, 7, 16)
    assert torch.allclose(module(other), forward(other), atol=1e-6)
    assert torch.allclose(module(other), forward(other), atol=1e-6) and len(accelerator.plans) == 2


@pytest.mark.parametrize("way", FLASH)
def test_flash_attn_is_one_operation(flash, way):
    one_operation(FLASH[way], flash.calls)


def by_sage(name="sageattn", **options):
    def attend(q, k, v):
        function = getattr(sys.modules["sageattention"], name)
        if options.get("tensor_layout") == "NHD":
            return function(q, k, v, **options)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return function(q, k, v, **options).transpose(1, 2)

    return attend


SAGE = {
    "HND": by_sage(is_causal=False, attn_mask=None, dropout_p=0.0),
    "NHD": by_sage(tensor_layout="NHD", sm_scale=0.3),
    "causal": by_sage(is_causal=True),
    "decorated": by_sage("sageattn_qk_int8_pv_fp16_cuda", return_lse=False, pv_accum_dtype="fp32"),
}


@pytest.mark.parametrize("way", SAGE)
def test_sageattention_is_one_operation(sage, way):
    one_operation(SAGE[way], sage.calls)


@live
@pytest.mark.parametrize("attend", [*FLASH.values(), *SAGE.values()], ids=[*FLASH, *SAGE])
def test_a_real_run_of_theirs_is_recorded_as_on_fake_tensors(flash, sage, attend):
    both_ways(attend)


def test_keys_that_sageattention_writes_to_stay_what_they_were(sage):
    def attend(q, k, v):
        k = k + 0
        first = by_sage(tensor_layout="NHD")(q, k.clone(), v)
        # the same keys for two: what one did to them would show in the other
        return first + by_sage(tensor_layout="NHD", is_causal=True)(q, k.clone(), v)

    module, call = Layer(attend), flatten_call((X,), {}, CPU)
    gm = capture(module.forward, call, [X], WeightArena(module)).graph_module
    clones = [n for n in gm.graph.nodes if n.target is aten.clone.default]
    assert len(clones) == 2
    for node in clones:
        # as cleanup does: operations are pure
        node.replace_all_uses_with(node.args[0])
    gm.recompile()
    expected = module(X)
    for _ in range(3):
        assert torch.allclose(gm(X)[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    "attend, word",
    [
        (by_flash(dropout_p=0.1), "dropout"),
        (by_flash(return_attn_probs=True), "return_attn_probs"),
        (by_sage("sageattn_qk_int8_pv_fp16_cuda", return_lse=True), "return_lse"),
        (lambda q, k, v: sys.modules["flash_attn"].flash_attn_varlen_func(q, k, v, q, q, 1, 1), "flash_attn_varlen"),
        (lambda q, k, v: sys.modules["sageattention"].sageattn_varlen(q, k, v, q, q, 1, 1), "sageattn_varlen"),
        (by_sage(further=object()), "builtins.object"),
    ],
)
def test_what_they_cannot_be_recorded_with_is_refused_by_name(flash, sage, attend, word):
    assert word in refused(attend)


def replaced_by_flash(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **kwargs):
    """As SD.Next replaces PyTorch's."""
    from flash_attn import flash_attn_func

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flash_attn_func(q=q, k=k, v=v, dropout_p=dropout_p, causal=is_causal, softmax_scale=scale).transpose(1, 2)


def replaced_by_sage(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **kwargs):
    from sageattention import sageattn

    return sageattn(q=q, k=k, v=v, attn_mask=None, dropout_p=0.0, is_causal=is_causal, scale=scale)


# steps of a hundredth make more of the last bit of a query
@pytest.mark.long(but=[0])
@pytest.mark.parametrize("replacement, error", [(replaced_by_flash, 1e-5), (replaced_by_sage, 5e-3)])
def test_a_whole_unet_over_a_replaced_attention(flash, sage, monkeypatch, replacement, error):
    from diffusers.models.attention_processor import AttnProcessor2_0

    unet, args, kwargs = network("sdxl")
    unet.set_attn_processor(AttnProcessor2_0())
    forward = unet.forward
    call = flatten_call(args, kwargs, CPU)
    plain = capture(forward, call, call.tensors(CPU), WeightArena(unet)).graph_module
    monkeypatch.setattr(F, "scaled_dot_product_attention", replacement)
    found = capture(forward, call, call.tensors(CPU), WeightArena(unet)).graph_module
    attentions = ops(plain.graph).count(aten.scaled_dot_product_attention.default)
    assert ops(found.graph).count(opaque.OPERATOR) == attentions > 5
    accelerator = accelerate(unet, Config(allow_cpu=True, drop_slower=False, check="always"))
    for width in (16, 24):
        given = (torch.randn(2, 4, 16, width), *args[1:])
        expected = forward(*given, **kwargs)[0]
        for _ in range(2):
            assert relative_error([unet(*given, **kwargs)[0]], [expected]) < error
    assert len(accelerator.plans) == 2 and all(plan.error < error for plan in accelerator.plans.values())
    # the projections are packed as they are around PyTorch's own
    assert all(plan.fused["packed_linear"] > 0 for plan in accelerator.plans.values())
