"""Constants of the kernels for diffusion transformers, of which test_nvrtc.py compiles each."""

from __future__ import annotations

from itertools import product

import torch

from sfast_ext.kernels.eight_bits import swiglu8
from sfast_ext.kernels.pointwise import modulated_norm, norm_rotary, swiglu
from sfast_ext.kernels.pointwise.modulated_norm import Parts

WIDTHS = (2048, 2304, 3072, 3840)
"""Channels of Anima, Lumina 2, Chroma and Flux, Z-Image."""
HEADS = ((128, 30), (96, 24), (96, 8), (128, 16), (64, 38))
"""Columns of a head, and how many heads there are."""
_PARTS = (
    Parts(norm=1, plus_one=True),
    Parts(norm=2, plus_one=True),
    Parts(True, True, True, 0),
    Parts(True, True, True, 1, True),
    Parts(True, False, False, 2, True),
)
_CODES = (Parts(norm=2, plus_one=True, codes=True, group=256), Parts(True, True, True, 1, True, codes=True))


def transformer_cases() -> list[tuple[str, dict[str, int]]]:
    """Of each kernel, what float16, bfloat16 and float32 ask for at the sizes of transformers."""
    found: list[tuple[str, dict[str, int]]] = []
    for dtype, pack in ((torch.float16, 8), (torch.bfloat16, 8), (torch.float32, 4), (torch.float16, 1)):
        widths, heads = (WIDTHS, HEADS) if dtype == torch.bfloat16 else (WIDTHS[-1:], HEADS[:1])
        if pack == 1:
            widths, heads = (77,), ((30, 5),)
        found.append(("swiglu", swiglu.constants(pack, dtype)))
        codes = () if dtype == torch.float32 else _CODES[pack == 1 :]
        for columns, parts in product(widths, (*_PARTS, *codes)):
            given = modulated_norm.constants(columns, pack, dtype, parts)
            assert given is not None
            found.append(("modulated_norm", given))
        if codes:
            for columns, gated, group in ((10240, True, 256), (9216, True, 0), (8192, False, 256)):
                given = swiglu8.constants(columns, pack, dtype, group * (pack > 1), gated=gated, tanh=False)
                if given is not None:
                    found.append(("activation8", given))
            given = swiglu8.constants(15360, pack, dtype, 256 * (pack > 1), gated=False, tanh=True, joined=True)
            if given is not None:
                found.append(("activation8", given))
        for (columns, count), form, norm in product(heads, norm_rotary.FORMS, (True, False)):
            if norm or form != "none":
                found.append(("norm_rotary", norm_rotary.constants(columns, count, pack, dtype, norm, form)))
    return [case for i, case in enumerate(found) if case not in found[:i]]
