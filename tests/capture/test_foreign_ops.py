"""Attention of other libraries as a graph records it: xformers' as PyTorch's own, the others' as one operation."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import Counter

import pytest
import torch
from foreign import CPU, HEADS, WIDTH, Layer, X, both_ways, captured, live, ops, refused, sdpa
from passes.networks import network
from torch.nn import functional as F

from sfast_ext import Config, accelerate
from sfast_ext.call_signature import flatten_call
from sfast_ext.capture.capture import capture
from sfast_ext.capture.live_trace import LiveTrace
from sfast_ext.passes import PassContext, run_passes
from sfast_ext.passes.rewrite import RESHAPE, is_op
from sfast_ext.weights.arena import WeightArena

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


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

    assert "KeyError (test_foreign_ops.py" in refused(broken)
    assert attend.__code__ is code
    captured(attend)
    assert attend.__code__ is code


def test_another_thread_generates_with_the_original_meanwhile(xformers):
    attend = xformers.ops.memory_efficient_attention
    q = torch.randn(1, 4, HEADS, WIDTH)
    expected, found = attend(q, q, q, p=0.0), []
    begin, end = threading.Event(), threading.Event()

    def other():
        begin.wait()
        with torch.no_grad():
            # the original takes what no capture would
            found.append(attend(q, q, q, attn_bias=xformers.ops.fmha.attn_bias.BlockDiagonalMask([4])))
        end.set()

    def inner(q, k, v):
        begin.set()
        end.wait(60)
        return attend(q, k, v)

    module, call = Layer(inner), flatten_call((X,), {}, CPU)
    thread = threading.Thread(target=other)
    thread.start()
    capture(module.forward, call, [X], WeightArena(module))
    thread.join()
    torch.testing.assert_close(found[0], expected)


def test_without_the_library_nothing_is_looked_for(monkeypatch):
    # as AUTOMATIC1111 does if --xformers is not given
    for name in ("xformers", "flash_attn", "sageattention"):
        monkeypatch.setitem(sys.modules, name, None)
    captured(sdpa)


# --- the original's real run ---


@live
@pytest.mark.parametrize("way", WAYS)
def test_a_real_run_is_recorded_as_on_fake_tensors(xformers, way):
    attend = WAYS[way][0]
    both_ways(lambda q, k, v: attend(xformers.ops, q, k, v))


@live
def test_upcast_is_the_same_in_a_real_run(xformers):
    with torch.autocast("cpu", torch.bfloat16):
        both_ways(lambda q, k, v: xformers.ops.memory_efficient_attention(q.float(), k.float(), v.float()))


@live
def test_a_real_run_with_what_is_refused_is_not_recorded(xformers):
    bias = xformers.ops.fmha.attn_bias.BlockDiagonalMask([5])
    module, call = Layer(lambda q, k, v: sdpa(q, k, v)), flatten_call((X[:1],), {}, CPU)
    module.attend = lambda q, k, v: xformers.ops.memory_efficient_attention(q, k, v, attn_bias=bias)
    trace = LiveTrace(call, WeightArena(module), CPU)
    assert torch.equal(trace.run(module, (X[:1],), {}), module(X[:1]))
    assert trace.recorded() is None


@live
def test_a_further_size_is_captured_as_it_runs(xformers, monkeypatch):
    from sfast_ext.capture import capture as room

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
    """Each operation that the output needs, with where all its arguments come from, whatever their order is."""
    traces, needed = {}, {next(iter(reversed(graph.nodes)))}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    found = Counter()
    for node in graph.nodes:
        arguments = (node.args[:1], {}) if is_op(node, RESHAPE) else (node.args, dict(node.kwargs))
        described = str(torch.fx.node.map_arg(arguments, lambda n: traces[n]))
        value = node.meta.get("val")
        meta = (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None
        name = node.target if node.op != "get_attr" else getattr(node.meta.get("weight"), "path", "constant")
        traces[node] = hashlib.sha256(f"{node.op} {name} {described} {meta}".encode()).hexdigest()
        if node in needed:
            found[f"{name} {meta} {traces[node][:8]}"] += 1
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


@pytest.mark.long
def test_diffusers_xformers_ends_in_the_plan_of_its_sdpa(xformers, monkeypatch):
    from diffusers.models import attention_processor

    monkeypatch.setattr(attention_processor, "xformers", xformers, raising=False)
    plans = []
    for processor in (attention_processor.XFormersAttnProcessor, attention_processor.AttnProcessor2_0):
        unet, args, kwargs = network("sd15")
        unet.set_attn_processor(processor())
        plans.append(planned(unet, args, kwargs))
    assert plans[0] == plans[1]


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
