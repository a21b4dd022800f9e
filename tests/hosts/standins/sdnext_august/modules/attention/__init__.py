"""One function in the place of torch's attention, which asks the kinds of attention that are on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

original = torch.nn.functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Entry:
    """A kind of attention, and the calls that it takes."""

    accepts: Callable[..., bool]
    call: Callable[..., torch.Tensor]


def install_router(*entries: Entry) -> None:
    """Put it there; without an entry, torch's own."""
    torch.nn.functional.scaled_dot_product_attention = make_router(entries) if entries else original


def make_router(entries: tuple[Entry, ...]) -> Callable[..., torch.Tensor]:
    """A new function for these entries."""

    @wraps(original)
    def router(query: Any, key: Any, value: Any, attn_mask: Any = None, **more: Any) -> torch.Tensor:
        for entry in entries:
            if entry.accepts(query, key, value, attn_mask):
                return entry.call(query, key, value, attn_mask, **more)
        return original(query, key, value, attn_mask, **more)

    return router
