"""Attention of other libraries as a graph records it: xformers' as PyTorch's own, the others' as one operation."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from foreign import imported
from passes.networks import network
from test_repeats import described
from torch import nn
from torch.nn import functional as F

from sfast_ext import Config, accelerate, opaque, watching
from sfast_ext.capture import CaptureRefused, capture
from sfast_ext.passes import PASSES, PassContext, run_passes
from sfast_ext.passes.rewrite import RESHAPE, is_op, is_pure
from sfast_ext.plan import relative_error
from sfast_ext.signature import flatten_call
from sfast_ext.tracing import record
from sfast_ext.watching import Watched
from sfast_ext.weights import WeightArena

CPU = torch.device("cpu")
HEADS, WIDTH = 3, 8
aten = torch.ops.aten
live = pytest.mark.skipif(not watching.WORKS, reason="an older torch keeps its modes in another way")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def xformers():
    with imported("xformers", "ops") as module:
        yield module


@pytest.fixture
def flash():
    with imported("flash_attn"):
        interface = sys.modules["flash_attn.flash_attn_interface"]
        interface.calls.clear()
        yield interface


@pytest.fixture
def sage():
    with imported("sageattention"):
        core = sys.modules["sageattention.core"]
        core.calls.clear()
        yield core


class Layer(nn.Module):
    """Projections (N, L, 16) to heads (N, L, H, D), around an attention over them."""

    def __init__(self, attend):
        super().__init__()
        torch.manual_seed(0)
        self.to_q, self.to_k, self.to_v = (nn.Linear(16, HEADS * WIDTH, bias=False) for _ in range(3))
        self.to_out = nn.Linear(HEADS * WIDTH, 16)
        self.attend = attend

    def forward(self, x):
        q, k, v = (f(x).reshape(*x.shape[:2], HEADS, WIDTH) for f in (self.to_q, self.to_k, self.to_v))
        out = self.attend(q, k, v)
        return self.to_out(out.reshape(*x.shape[:2], HEADS * WIDTH)) + x


def sdpa(q, k, v, **options):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)


X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


def captured(attend, **tolerances):
    module, call = Layer(attend), flatten_call((X,), {}, CPU)
    found = capture(module.forward, call, [X], WeightArena(module))
    torch.testing.assert_close(found.graph_module(X)[0], module(X), **tolerances)
    return found


def ops(graph):
    return [n.target for n in graph.nodes if n.op == "call_function"]


def as_recorded(graph_module):
    """Each node but for its strides: nobody's memory lies as another's."""
    return [(op, target, args, meta and meta[:2]) for op, target, args, meta in described(graph_module)]


# --- xformers ---


def test_xformers_attention_is_recorded_as_pytorchs(xformers):
    ours = captured(lambda q, k, v: xformers.ops.memory_efficient_attention(q, k, v, attn_bias=None, op=None))
    theirs = captured(sdpa)
    assert ops(ours.graph_module.graph) == ops(theirs.graph_module.graph)
    assert aten.scaled_dot_product_attention.default in ops(ours.graph_module.graph)


def rows(x):
    """(N, L, H, D) -> (N * H, L, D)."""
    return x.permute(0, 2, 1, 3).reshape(-1, x.shape[1], x.shape[3])


def heads(x):
    return x.reshape(-1, HEADS, *x.shape[1:]).permute(0, 2, 1, 3)


MASK = torch.randn(2, HEADS, 5, 5, generator=torch.Generator().manual_seed(2))


def mask(q):
    """A bias (N, H, L, L) that a capture takes for the forward's own."""
    return (q @ q.transpose(-2, -1)).new_zeros(()) + torch.einsum("nlhd,nshd->nhls", q, q)


WAYS = {
    "scale": (
        lambda x, q, k, v: x.memory_efficient_attention(q, k, v, scale=0.3),
        lambda q, k, v: sdpa(q, k, v, scale=0.3),
    ),
    "scale of its own": (
        lambda x, q, k, v: x.memory_efficient_attention(q, k, v, scale=WIDTH**-0.5),
        sdpa,
    ),
    "causal": (
        lambda x, q, k, v: x.memory_efficient_attention(q, k, v, attn_bias=x.LowerTriangularMask()),
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
    ),
    "mask": (
        lambda x, q, k, v: x.memory_efficient_attention(q, k, v, mask(q)),
        lambda q, k, v: sdpa(q, k, v, attn_mask=mask(q)),
    ),
    "cutlass": (
        lambda x, q, k, v: x.memory_efficient_attention(q, k, v, op=x.MemoryEfficientAttentionCutlassOp),
        sdpa,
    ),
    "forward": (
        lambda x, q, k, v: x.memory_efficient_attention_forward(q, k, v, op=x.fmha.cutlass.FwOp),
        sdpa,
    ),
    "three dimensions": (
        lambda x, q, k, v: heads(x.memory_efficient_attention(*map(rows, (q, k, v)))),
        sdpa,
    ),
    "three dimensions, mask": (
        lambda x, q, k, v: heads(x.memory_efficient_attention(*map(rows, (q, k, v)), mask(q).flatten(0, 1))),
        lambda q, k, v: sdpa(q, k, v, attn_mask=mask(q)),
    ),
    "three dimensions, causal": (
        lambda x, q, k, v: heads(x.memory_efficient_attention(*map(rows, (q, k, v)), x.LowerTriangularMask())),
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_options_of_xformers_attention(xformers, way):
    theirs, expected = WAYS[way]
    found = captured(lambda q, k, v: theirs(xformers.ops, q, k, v))
    (node,) = [n for n in found.graph_module.graph.nodes if n.target is aten.scaled_dot_product_attention.default]
    (wanted,) = [
        n for n in captured(expected).graph_module.graph.nodes if n.target is aten.scaled_dot_product_attention.default
    ]
    assert node.kwargs == wanted.kwargs
    assert node.args[4:] == wanted.args[4:] and len(node.args) == len(wanted.args)
    torch.testing.assert_close(found.graph_module(X)[0], Layer(expected)(X))


def test_the_logarithm_of_sums_is_given_too(xformers):
    def attend(causal):
        def inner(q, k, v):
            bias = xformers.ops.LowerTriangularMask() if causal else mask(q)
            out, lse = xformers.ops.memory_efficient_attention_forward_requires_grad(q, k, v, bias, scale=0.4)
            return out * lse.transpose(1, 2)[..., None]

        return inner

    captured(attend(True))
    captured(attend(False))


def test_a_view_of_the_result_may_be_taken(xformers):
    def attend(q, k, v):
        # PyTorch's with a mask lays its result out otherwise, xformers' never does
        return xformers.ops.memory_efficient_attention(q, k, v, mask(q)).view(2, 5, HEADS * WIDTH)

    captured(attend)


def test_a_function_imported_by_name_is_met(xformers):
    from xformers.ops import memory_efficient_attention

    assert aten.scaled_dot_product_attention.default in ops(captured(memory_efficient_attention).graph_module.graph)


def test_a_replaced_scaled_dot_product_attention_is_passed_by(xformers, monkeypatch):
    called = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: called.append(args))
    captured(lambda q, k, v: xformers.ops.memory_efficient_attention(q, k, v))
    assert not called


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_upcast_attention_stays_so_under_autocast(xformers, dtype):
    def attend(q, k, v):
        q, k, v = (x.to(dtype) for x in (q, k, v))
        out = xformers.ops.memory_efficient_attention(q, k, v)
        assert out.dtype == dtype
        return out.to(torch.bfloat16)

    with torch.autocast("cpu", torch.bfloat16):
        found = captured(attend, atol=0.01, rtol=0.01)
        assert torch.is_autocast_cpu_enabled()
    (node,) = [n for n in found.graph_module.graph.nodes if n.target is aten.scaled_dot_product_attention.default]
    assert {n.meta["val"].dtype for n in (node, *node.args[:3])} == {dtype}


def refused(attend):
    module, call = Layer(attend), flatten_call((X,), {}, CPU)
    with pytest.raises(CaptureRefused) as caught:
        capture(module.forward, call, [X], WeightArena(module))
    return str(caught.value)


def test_what_cannot_be_recorded_is_refused_by_name(xformers):
    attend, bias = xformers.ops.memory_efficient_attention, xformers.ops.fmha.attn_bias
    code = attend.__code__
    assert "BlockDiagonalMask" in refused(lambda q, k, v: attend(q, k, v, bias.BlockDiagonalMask([5])))
    both = "LowerTriangularMaskWithTensorBias"
    assert both in refused(lambda q, k, v: attend(q, k, v, bias.LowerTriangularMaskWithTensorBias(mask(q))))
    assert "a tensor of torch.bool" in refused(lambda q, k, v: attend(q, k, v, mask(q) > 0))
    assert "dropout" in refused(lambda q, k, v: attend(q, k, v, p=0.1))
    assert "5 dimensions" in refused(lambda q, k, v: attend(q[None], k[None], v[None]))
    assert attend.__code__ is code


def test_a_refusal_that_the_host_catches_is_one_nevertheless(xformers):
    def attend(q, k, v):
        try:
            return xformers.ops.memory_efficient_attention(q, k, v, p=0.1)
        except Exception:
            return q

    assert "dropout" in refused(attend)

    def otherwise(q, k, v):
        try:
            return attend(q, k, v)
        finally:
            raise KeyError("later")

    assert "dropout" in refused(otherwise)


def test_nothing_stays_patched(xformers):
    attend, code = xformers.ops.memory_efficient_attention, xformers.ops.memory_efficient_attention.__code__

    def broken(q, k, v):
        assert attend.__code__ is not code
        raise KeyError("mine")

    assert "mine" in refused(broken)
    assert attend.__code__ is code
    captured(attend)
    assert attend.__code__ is code


def test_another_thread_generates_with_the_original_meanwhile(xformers):
    attend = xformers.ops.memory_efficient_attention
    q = torch.randn(1, 4, HEADS, WIDTH)
    expected, found = attend(q, q, q, p=0.0), []

    def other():
        with torch.no_grad():
            # the original takes what no capture would
            found.append(attend(q, q, q, attn_bias=xformers.ops.fmha.attn_bias.BlockDiagonalMask([4])))

    def inner(q, k, v):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return attend(q, k, v)

    module, call = Layer(inner), flatten_call((X,), {}, CPU)
    capture(module.forward, call, [X], WeightArena(module))
    torch.testing.assert_close(found[0], expected)


def test_without_the_library_nothing_is_looked_for(monkeypatch):
    # as AUTOMATIC1111 does where --xformers is not given
    for name in ("xformers", "flash_attn", "sageattention"):
        monkeypatch.setitem(sys.modules, name, None)
    captured(sdpa)


# --- the original's real run ---


@live
@pytest.mark.parametrize("way", WAYS)
def test_a_real_run_is_recorded_as_on_fake_tensors(xformers, way):
    attend = WAYS[way][0]
    both_ways(lambda q, k, v: attend(xformers.ops, q, k, v))


def both_ways(attend):
    module, call = Layer(attend), flatten_call((X,), {}, CPU)
    expected = module(X)
    watched = Watched(call, WeightArena(module), CPU)
    result = watched.run(module, (X,), {})
    assert torch.equal(result, expected)
    assert watched.recorded() is not None, watched._why_not
    on_fakes = record(lambda x: [module(x)], [X])
    assert as_recorded(watched.recorded()[0]) == as_recorded(on_fakes)


@live
def test_upcast_is_the_same_in_a_real_run(xformers):
    with torch.autocast("cpu", torch.bfloat16):
        both_ways(lambda q, k, v: xformers.ops.memory_efficient_attention(q.float(), k.float(), v.float()))


@live
def test_a_real_run_with_what_is_refused_is_not_recorded(xformers):
    bias = xformers.ops.fmha.attn_bias.BlockDiagonalMask([5])
    module, call = Layer(lambda q, k, v: sdpa(q, k, v)), flatten_call((X[:1],), {}, CPU)
    module.attend = lambda q, k, v: xformers.ops.memory_efficient_attention(q, k, v, attn_bias=bias)
    watched = Watched(call, WeightArena(module), CPU)
    assert torch.equal(watched.run(module, (X[:1],), {}), module(X[:1]))
    assert watched.recorded() is None


@live
def test_a_further_size_is_captured_as_it_runs(xformers, monkeypatch):
    from sfast_ext import capture as room

    recordings = []
    original = room.record
    monkeypatch.setattr(room, "record", lambda *args: recordings.append(args) or original(*args))
    module = Layer(lambda q, k, v: xformers.ops.memory_efficient_attention(q, k, v))
    forward = module.forward
    accelerator = accelerate(module, Config(allow_cpu=True, drop_slower=False, check="always"))
    for tokens in (5, 7, 9):
        x = torch.randn(2, tokens, 16)
        for _ in range(2):
            torch.testing.assert_close(module(x), forward(x))
    assert len(recordings) == 1 and len(accelerator.plans) == 3


# --- hosts' own attention: one plan, whichever is chosen ---


def by_xformers(self, x, context=None, mask=None, **kwargs):
    """As AUTOMATIC1111 calls it."""
    import xformers.ops

    context = x if context is None else context
    q, k, v = (f(y) for f, y in ((self.to_q, x), (self.to_k, context), (self.to_v, context)))
    q, k, v = (t.reshape(t.shape[0], t.shape[1], self.heads, -1) for t in (q, k, v))
    out = xformers.ops.memory_efficient_attention(q, k, v, attn_bias=None, op=None).to(q.dtype)
    return self.to_out(out.reshape(*out.shape[:2], -1))


def by_sdpa(self, x, context=None, mask=None, **kwargs):
    """As AUTOMATIC1111 calls it with --opt-sdp-attention."""
    context = x if context is None else context
    batch, _, inner = x.shape
    q, k, v = (f(y) for f, y in ((self.to_q, x), (self.to_k, context), (self.to_v, context)))
    q, k, v = (t.view(batch, -1, self.heads, inner // self.heads).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False)
    out = out.transpose(1, 2).reshape(batch, -1, inner).to(q.dtype)
    return self.to_out[1](self.to_out[0](out))


def planned(unet, args, kwargs):
    """All operations of the plan, with their arguments and what comes out of each."""
    call = flatten_call(args, kwargs, CPU)
    arena = WeightArena(unet)
    found = capture(unet.forward, call, call.tensors(CPU), arena)
    gm = found.graph_module
    run_passes(gm, PassContext(arena, CPU, triton=False))
    expected = unet(*args, **kwargs)
    torch.testing.assert_close(gm(*call.tensors(CPU))[0], expected if torch.is_tensor(expected) else expected[0])
    return operations(gm.graph)


def operations(graph):
    """Each operation that the output needs, with its arguments, in an order that the graph's own says nothing about."""
    places, found = {}, []

    def place(node):
        if node not in places:
            arguments = (node.args[:1], {}) if is_op(node, RESHAPE) else (node.args, dict(node.kwargs))
            described = str(torch.fx.node.map_arg(arguments, place))
            value = node.meta.get("val")
            meta = (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None
            found.append((node.op, node.target if node.op == "call_function" else "", described, meta))
            places[node] = len(places)
        return places[node]

    place(next(iter(reversed(graph.nodes))))
    return found


def test_automatic1111s_xformers_ends_in_the_plan_of_its_sdp(xformers, monkeypatch):
    pytest.importorskip("ldm")
    from ldm.modules.attention import CrossAttention

    plans = []
    for forward in (by_xformers, by_sdpa):
        unet, args, kwargs = network("ldm")
        assert any(type(module) is CrossAttention for module in unet.modules())
        monkeypatch.setattr(CrossAttention, "forward", forward)
        plans.append(planned(unet, args, kwargs))
    assert plans[0] == plans[1]


@pytest.mark.xfail("attention_heads" not in dict(PASSES), reason="no pass takes batch and heads apart yet", strict=True)
def test_diffusers_xformers_ends_in_the_plan_of_its_sdpa(xformers, monkeypatch):
    from diffusers.models import attention_processor

    monkeypatch.setattr(attention_processor, "xformers", xformers, raising=False)
    plans = []
    for processor in (attention_processor.XFormersAttnProcessor, attention_processor.AttnProcessor2_0):
        unet, args, kwargs = network("sd15")
        unet.set_attn_processor(processor())
        plans.append(planned(unet, args, kwargs))
    assert plans[0] == plans[1]


# --- flash_attn and SageAttention ---


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


@pytest.mark.gpu
def test_on_a_gpu_xformers_attention_is_part_of_a_cuda_graph(xformers):
    module = Layer(lambda q, k, v: xformers.ops.memory_efficient_attention(q, k, v)).half().cuda()
    forward = module.forward
    accelerator = accelerate(module, Config(drop_slower=False, check="always"))
    for tokens in (64, 96, 80):
        x = torch.randn(2, tokens, 16, dtype=torch.float16, device="cuda")
        for _ in range(2):
            torch.testing.assert_close(module(x), forward(x), atol=0.01, rtol=0.01)
    assert len(accelerator.plans) == 3 and all(plan.has_graph for plan in accelerator.plans.values())
