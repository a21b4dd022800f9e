"""The attentions of WebUIs against PyTorch's own, over odd sizes, forced slices and little free memory."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sfast_ext.tools.lib import Unavailable, attentions

WRITTEN = ("sdp", "doggettx", "v1", "invokeai", "subquad")
# everything but xformers, which is not installed here
HERE = tuple(name for name in attentions.NAMES if name != "xformers")


class Layer(nn.Module):
    """What a processor asks of diffusers' Attention."""

    def __init__(self, heads=3, channels=8, context=24):
        super().__init__()
        width = heads * channels
        self.heads, self.scale = heads, channels**-0.5
        self.to_q, self.to_k, self.to_v = nn.Linear(width, width), nn.Linear(context, width), nn.Linear(context, width)
        self.to_out = nn.ModuleList([nn.Linear(width, width), nn.Dropout(0.0)])


def expected(layer, x, context=None):
    context = x if context is None else context
    q, k, v = (
        projection(value).unflatten(-1, (layer.heads, -1)).transpose(1, 2)
        for projection, value in ((layer.to_q, x), (layer.to_k, context), (layer.to_v, context))
    )
    out = nn.functional.scaled_dot_product_attention(q, k, v)
    return layer.to_out[0](out.transpose(1, 2).flatten(2))


@pytest.fixture
def layer():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Layer()


def tokens(batch, count, seed=0):
    return torch.randn(batch, count, 24, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(("batch", "queries", "keys"), [(2, 35, 35), (1, 1, 7), (3, 64, 13), (2, 1031, 5)])
def test_values_are_those_of_scaled_dot_product_attention(layer, name, batch, queries, keys):
    x, context = tokens(batch, queries), None if keys == queries else tokens(batch, keys, 1)
    with torch.no_grad():
        ours = attentions.Processor(name)(layer, x, context)
        torch.testing.assert_close(ours, expected(layer, x, context), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in WRITTEN if name in attentions.IN_SLICES])
@pytest.mark.parametrize("slices", [1, 2, 3, 5, 8, 35, 100])
def test_forced_slices_change_no_value(layer, name, slices):
    x, context = tokens(2, 35), tokens(2, 9, 1)
    with torch.no_grad():
        ours = attentions.Processor(name, slices=slices)(layer, x, context)
        torch.testing.assert_close(ours, expected(layer, x, context), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in WRITTEN if name in attentions.IN_SLICES])
@pytest.mark.parametrize("divisor", [1, 3, 5, 20])
def test_little_free_memory_makes_slices_and_changes_no_value(layer, name, divisor, monkeypatch):
    x = tokens(2, 45)
    scores = 2 * 3 * 45 * 45 * 4
    asked, products = [], Products()
    monkeypatch.setattr(attentions, "free_memory", lambda device: asked.append(device) or scores // divisor)
    with torch.no_grad(), products:
        ours = attentions.Processor(name)(layer, x)
    torch.testing.assert_close(ours, expected(layer, x), rtol=1e-4, atol=1e-5)
    assert asked
    # two products for each slice; InvokeAI counts in MB, and this is less than one
    assert products.batched >= (2 if name == "invokeai" or divisor == 1 else 4)


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts batched products, and keeps the types of what goes into a softmax."""

    def __init__(self):
        super().__init__()
        self.batched, self.softmax = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.batched += function in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)
        if function is torch.ops.aten._softmax.default:
            self.softmax.append((args[0].dtype, args[0].shape))
        return out


def test_doggettx_cuts_the_queries_by_powers_of_two_and_v1_takes_two_heads(layer, monkeypatch):
    x = tokens(2, 45)
    monkeypatch.setattr(attentions, "free_memory", lambda device: 2 * 3 * 45 * 45 * 4)
    for name, wanted in (("doggettx", [(6, 11, 45)] * 4 + [(6, 1, 45)]), ("v1", [(2, 45, 45)] * 3)):
        with torch.no_grad(), Products() as seen:
            attentions.Processor(name)(layer, x)
        assert [tuple(shape) for _, shape in seen.softmax] == wanted


def test_invokeai_cuts_heads_first_and_then_queries(layer, monkeypatch):
    x = tokens(2, 300)
    for mb, wanted in ((4, (6, 300, 300)), (1, (3, 300, 300)), (0.4, (1, 300, 300)), (0.1, (6, 18, 300))):
        monkeypatch.setattr(attentions, "free_memory", lambda device, mb=mb: int(3.3 * mb * 2**20))
        with torch.no_grad(), Products() as seen:
            ours = attentions.Processor("invokeai")(layer, x)
        assert tuple(seen.softmax[0][1]) == wanted
        torch.testing.assert_close(ours, expected(layer, x), rtol=1e-4, atol=1e-5)


def test_doggettx_says_when_no_number_of_slices_is_enough(layer, monkeypatch):
    monkeypatch.setattr(attentions, "free_memory", lambda device: 100)
    with pytest.raises(RuntimeError, match="not enough memory"):
        attentions.Processor("doggettx")(layer, tokens(2, 45))


@pytest.mark.parametrize("name", WRITTEN)
def test_upcast_computes_in_fp32_and_gives_back_the_type(layer, name):
    half = layer.to(torch.bfloat16)
    x = tokens(2, 35).to(torch.bfloat16)
    with torch.no_grad(), Products() as seen:
        ours = attentions.Processor(name, upcast=True)(half, x)
    assert ours.dtype == torch.bfloat16
    assert all(dtype == torch.float32 for dtype, _ in seen.softmax)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), Products() as cast:
        attentions.Processor(name, upcast=True)(half, x)
    assert all(dtype == torch.float32 for dtype, _ in cast.softmax)
    assert name == "sdp" or (seen.softmax and cast.softmax)
    with torch.no_grad():
        torch.testing.assert_close(ours, expected(half, x), rtol=3e-2, atol=3e-2)


@pytest.mark.thinned("name", "model")
@pytest.mark.parametrize("model", ["sd15", "sdxl"])
@pytest.mark.parametrize("name", HERE)
def test_a_unet_computes_the_same_with_each(tiny_unet, unet_inputs, model, name):
    unet = tiny_unet(model)
    args, kwargs = unet_inputs(unet, 72, 64)
    for attn in (attn for _, attn in attentions.attention_layers(unet)):
        assert type(attn.processor).__name__ == "AttnProcessor2_0"
    with torch.no_grad():
        wanted = unet(*args, **kwargs)[0]
        for upcast in (False, True):
            for slices in (None, 3) if name in attentions.IN_SLICES else (None,):
                attentions.install(unet, name, upcast=upcast, slices=slices)
                torch.testing.assert_close(unet(*args, **kwargs)[0], wanted, rtol=1e-3, atol=1e-4)


def test_slices_are_forced_between_calls(tiny_unet):
    unet = tiny_unet()
    attentions.install(unet, "doggettx")
    attentions.force_slices(unet, 4)
    assert {attn.processor.slices for _, attn in attentions.attention_layers(unet)} == {4}


def test_what_cannot_be_had_is_refused_in_words(tiny_unet, monkeypatch):
    unet = tiny_unet()
    before = [attn.processor for _, attn in attentions.attention_layers(unet)]
    monkeypatch.setitem(sys.modules, "xformers", None)
    monkeypatch.setitem(sys.modules, "xformers.ops", None)
    for name, more, words in (
        ("xformers", {}, "xformers cannot be imported"),
        ("xformers", {"upcast": True}, "xformers cannot be imported"),
        ("doggetx", {}, "no attention is called 'doggetx'; there are sdp, plain"),
        ("v1", {"slices": 2}, "'v1' cannot be cut into 2 slices"),
        ("doggettx", {"slices": 0}, "'doggettx' cannot be cut into 0 slices"),
    ):
        with pytest.raises(Unavailable, match=words):
            attentions.install(unet, name, **more)
    with pytest.raises(Unavailable, match="only diffusers' models"):
        attentions.install(nn.Linear(2, 2), "v1")
    attentions.attention_layers(unet)[-1][1].group_norm = nn.GroupNorm(1, 32)
    with pytest.raises(Unavailable, match="this one has group_norm"):
        attentions.install(unet, "v1")
    assert [attn.processor for _, attn in attentions.attention_layers(unet)] == before
    with pytest.raises(ValueError, match="takes no mask"):
        attentions.Processor("v1")(Layer(), tokens(1, 3), attention_mask=torch.zeros(1, 3))


def test_xformers_through_its_own_function(tiny_unet, unet_inputs, monkeypatch):
    """With a stand-in for the package: what it is called with, and what becomes of its result."""
    seen = []

    def memory_efficient_attention(q, k, v, attn_bias=None, op=None, scale=None):
        seen.append(q.shape)
        heads = [t if t.dim() == 4 else t[:, :, None] for t in (q, k, v)]
        q, k, v = (t.transpose(1, 2) for t in heads)
        out = nn.functional.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)
        return out if len(seen[-1]) == 4 else out[:, :, 0]

    ops = SimpleNamespace(memory_efficient_attention=memory_efficient_attention)
    package = SimpleNamespace(ops=ops)
    monkeypatch.setitem(sys.modules, "xformers", package)
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)
    from diffusers.models import attention_processor

    unet = tiny_unet()
    args, kwargs = unet_inputs(unet)
    with torch.no_grad():
        wanted = unet(*args, **kwargs)[0]
        monkeypatch.setattr(attention_processor, "xformers", None)
        with pytest.raises(Unavailable, match="diffusers did not find xformers"):
            attentions.install(unet, "xformers")
        monkeypatch.setattr(attention_processor, "xformers", package)
        for upcast, dimensions in ((False, 3), (True, 4)):
            seen.clear()
            attentions.install(unet, "xformers", upcast=upcast)
            torch.testing.assert_close(unet(*args, **kwargs)[0], wanted, rtol=1e-3, atol=1e-4)
            assert {len(shape) for shape in seen} == {dimensions}


def test_free_memory_counts_what_the_allocator_keeps_and_is_not_asked_while_a_graph_is_captured(monkeypatch):
    gpu = torch.device("cuda", 0)
    stats = {"reserved_bytes.all.current": 700, "active_bytes.all.current": 200}
    capturing = [False]
    monkeypatch.setattr(attentions, "_measured", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    assert attentions.free_memory(gpu) == 1500
    capturing[0], stats["active_bytes.all.current"] = True, 600
    assert attentions.free_memory(gpu) == 1500
    capturing[0] = False
    assert attentions.free_memory(gpu) == 1100
    assert attentions.free_memory(torch.device("cpu")) == sys.maxsize
