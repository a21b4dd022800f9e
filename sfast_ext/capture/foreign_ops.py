"""Recording of attention by xformers, flash_attn, SageAttention and PyTorch's flex_attention, and of what
`integer_products` knows.

The operators of these libraries have no fake implementations, at least in some versions. So the call is recorded, not
the operators that it runs. A call of xformers becomes PyTorch's scaled dot product attention, which computes the same
and has passes and kernels. So does flex_attention if it changes no score. A call of flash_attn or SageAttention stays
one operation that calls the library: a user chose it for its properties (SageAttention rounds to 8 bits). No library is
imported here: the host cannot call one that it has not imported.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from sfast_ext import reasons
from sfast_ext.call_signature import NotOurs, autocast_mode
from sfast_ext.capture import integer_products, opaque
from sfast_ext.capture.interception import intercepted
from sfast_ext.reasons import one_line

Recorder = Callable[..., Any]
"""Records a call: takes the library's function and the arguments, and returns what the function would return."""

# not F.scaled_dot_product_attention, which SD.Next and others replace
_sdpa = torch._C._nn.scaled_dot_product_attention
_TENSORS = (Tensor, torch.nn.Parameter, FakeTensor)


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Within, active modes record this thread's calls.

    Raises:
        NotOurs: a call cannot be recorded. It is raised again at the end if the caller caught it: what the caller then
            did is not what it does in a real run.
    """
    refusals: list[NotOurs] = []

    def noting(recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
        try:
            return recorder(*args, **kwargs)
        except NotOurs as exc:
            refusals.append(exc)
            raise

    try:
        with intercepted({function: functools.partial(noting, r) for function, r in recorders().items()}):
            yield
    except Exception as exc:
        if not refusals or exc is refusals[0]:
            raise
        raise refusals[0] from exc
    if refusals:
        raise refusals[0]


def recorders() -> dict[FunctionType, Recorder]:
    """The recorder for each function of a library that the host has imported."""
    found: dict[FunctionType, Recorder] = {}
    for home, names in _RECORDERS.items():
        module = sys.modules.get(home)
        for name, recorder in names.items():
            function = getattr(module, name, None)
            if isinstance(function, FunctionType) and function.__module__.partition(".")[0] == home.partition(".")[0]:
                found[function] = recorder
    sage = sys.modules.get("sageattention")
    for name, function in dict(vars(sage) if sage is not None else {}).items():
        if name.startswith("sageattn") and isinstance(function, FunctionType):
            found[function] = _refused if name.endswith("varlen") else _sage
    return found | integer_products.recorders()


# --- xformers ---


def _memory_efficient(
    original: FunctionType,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    **others: Any,
) -> Tensor:
    """xformers' attention. Shapes are (batch, tokens, heads, channels), or (batch, tokens, channels) for one head."""
    return _attend(original, query, key, value, attn_bias, p, scale, others)[0]


def _memory_efficient_with_lse(
    original: FunctionType,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """The same, and the log-sum-exp of the scores (batch, heads, queries) in float32."""
    result, q, k, mask, causal = _attend(original, query, key, value, attn_bias, p, scale, others)
    scores = (q.float() @ k.float().transpose(-2, -1)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores + mask.float()
    if causal:
        scores = scores + torch.full_like(scores, float("-inf")).triu(1)
    return result, scores.logsumexp(-1)


def _attend(
    original: FunctionType,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Any,
    p: float,
    scale: float | None,
    others: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
    """The result, queries and keys (batch, heads, tokens, channels), the mask, and whether it is causal."""
    name = f"xformers' {original.__name__}"
    if p:
        raise NotOurs(reasons.DROPOUT(name))
    if query.dim() not in (3, 4):
        raise NotOurs(reasons.DIMENSIONS(name, query.dim()))
    for option, given in others.items():
        if given is not None and not (option == "output_dtype" and given == query.dtype):
            raise NotOurs(reasons.OPTION_NOT_RECORDED(name, one_line(f"{option}={given}")))
    mask, causal = _mask(name, bias)
    one_head = query.dim() == 3
    q, k, v = (x.unsqueeze(1) if one_head else x.transpose(1, 2) for x in (query, key, value))
    if one_head and mask is not None:
        mask = mask.unsqueeze(1)
    # the default scale is omitted, as in a plain call
    options = {} if scale is None or scale == q.shape[-1] ** -0.5 else {"scale": scale}
    with _as_it_is(q):
        out = _sdpa(q, k, v, mask, 0.0, causal, **options)
    # xformers' result is contiguous too: a caller may take a view of it
    result = (out.squeeze(1) if one_head else out.transpose(1, 2)).contiguous()
    return result, q, k, mask, causal


def _mask(name: str, bias: Any) -> tuple[Tensor | None, bool]:
    """An attention bias as an additive mask, and whether it is the causal mask."""
    if bias is None:
        return None, False
    kind = type(bias)
    # in newer versions these classes are subclasses of tensors
    if kind in _TENSORS and bias.is_floating_point():
        return bias, False
    if kind.__name__ == "LowerTriangularMask" and kind.__module__.startswith("xformers."):
        return None, True
    is_tensor = kind in _TENSORS
    raise NotOurs(reasons.BIAS_DTYPE(name, bias.dtype) if is_tensor else reasons.BIAS_CLASS(name, kind.__name__))


@contextlib.contextmanager
def _as_it_is(x: Tensor) -> Iterator[None]:
    """Disable autocast if it would change the dtype of `x`: PyTorch's attention takes part in autocast, xformers' does
    not. The graph does not record this."""
    device = x.device.type
    mode = autocast_mode(device)
    if not mode or x.dtype == mode[1]:
        yield
        return
    _set_autocast(device, False)
    try:
        yield
    finally:
        _set_autocast(device, True)


def _set_autocast(device: str, on: bool) -> None:
    if hasattr(torch, "get_autocast_dtype"):
        torch.set_autocast_enabled(device, on)
    elif device == "cuda":
        torch.set_autocast_enabled(on)
    else:
        torch.set_autocast_cpu_enabled(on)


# --- flex_attention ---


def _flex(original: FunctionType, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """flex_attention, shapes (batch, heads, tokens, channels). A function may change its scores."""
    given = dict(inspect.signature(original).bind(query, key, value, *args, **kwargs).arguments)
    scale = given.pop("scale", None)
    for option in list(given)[3:]:
        if given[option]:
            raise NotOurs(reasons.OPTION_NOT_RECORDED("flex_attention", option))
    options = {} if scale is None or scale == query.shape[-1] ** -0.5 else {"scale": scale}
    return _sdpa(query, key, value, None, 0.0, False, **options)


# --- flash_attn and SageAttention ---


def _like_first(tensors: Sequence[Tensor]) -> Sequence[int]:
    return tensors[0].shape


def _like_packed(tensors: Sequence[Tensor]) -> Sequence[int]:
    """For an input (batch, tokens, 3, heads, channels)."""
    return (*tensors[0].shape[:2], *tensors[0].shape[3:])


def _flash(original: FunctionType, *args: Any, **kwargs: Any) -> Tensor:
    return _opaque("flash_attn", original, _like_first, args, kwargs)


def _flash_packed(original: FunctionType, *args: Any, **kwargs: Any) -> Tensor:
    return _opaque("flash_attn", original, _like_packed, args, kwargs)


def _sage(original: FunctionType, *args: Any, **kwargs: Any) -> Tensor:
    return _opaque("sageattention", original, _like_first, args, kwargs)


def _opaque(
    library: str, original: FunctionType, shape: opaque.Shape, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    name = f"{library}.{original.__name__}"
    bound = inspect.signature(original).bind(*args, **kwargs)
    given = dict(bound.arguments)
    for kind in inspect.signature(original).parameters.values():
        if kind.kind is kind.VAR_KEYWORD:
            given.update(given.pop(kind.name, {}))
    if given.get("dropout_p"):
        raise NotOurs(reasons.DROPOUT(name))
    for option in ("return_attn_probs", "return_lse"):
        if given.get(option):
            raise NotOurs(reasons.OPTION_NOT_RECORDED(name, option))
    try:
        return opaque.call(name, original, shape, bound.args, bound.kwargs)
    except opaque.NotPlain as exc:
        raise NotOurs(exc.reason) from exc


def _refused(original: FunctionType, *args: Any, **kwargs: Any) -> NoReturn:
    library = original.__module__.partition(".")[0]
    raise NotOurs(reasons.CALL_NOT_RECORDED(f"{library}.{original.__name__}"))


_RECORDERS: dict[str, dict[str, Recorder]] = {
    "xformers.ops.fmha": {
        "memory_efficient_attention": _memory_efficient,
        "memory_efficient_attention_forward": _memory_efficient,
        "memory_efficient_attention_forward_requires_grad": _memory_efficient_with_lse,
        "memory_efficient_attention_partial": _refused,
    },
    "torch.nn.attention.flex_attention": {"flex_attention": _flex},
    "flash_attn.flash_attn_interface": {
        "flash_attn_func": _flash,
        "flash_attn_kvpacked_func": _flash,
        "flash_attn_qkvpacked_func": _flash_packed,
        "flash_attn_varlen_func": _refused,
        "flash_attn_varlen_kvpacked_func": _refused,
        "flash_attn_varlen_qkvpacked_func": _refused,
        "flash_attn_with_kvcache": _refused,
    },
}
"""By module and name of the function."""
