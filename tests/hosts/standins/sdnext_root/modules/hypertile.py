"""HyperTile: forwards of attention layers wrapped for the length of a job."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def split_attention(unet: Any, enabled: bool) -> Iterator[None]:
    layers = [m for n, m in unet.named_modules() if n.endswith("attn1")] if enabled else []

    def wrapped(forward: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            random.randint(0, 3)
            return forward(*args, **kwargs)

        return wrapper

    for layer in layers:
        layer._original_forward = layer.forward
        layer.forward = wrapped(layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            layer.forward = layer._original_forward
            del layer._original_forward
