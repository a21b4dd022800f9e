"""A call in words, for the report."""

from __future__ import annotations

from typing import Any

import torch

_SHORT = {
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "bool",
}  # fmt: skip


def words(tree: Any, name: str) -> list[str]:
    """The tensors, numbers and constants of a tree, each with its name."""
    tag = tree[0]
    label = f"{name} " if name else ""
    if tag == "call":
        found = [w for i, t in enumerate(tree[1]) for w in words(t, f"#{i}")]
        return found + [w for k, t in tree[2] for w in words(t, k)]
    if tag == "tensor":
        order = "" if len(tree) == 4 else f" in the order {','.join(map(str, tree[3]))}"
        return [f"{label}{_SHORT.get(tree[1], str(tree[1]))}[{','.join(map(str, tree[2]))}]{order}"]
    if tag == "number":
        return [f"{label}{tree[1].__name__}"]
    if tag == "const":
        return [] if tree[2] is None else [f"{name}={tree[2]}"]
    if tag in ("tuple", "list"):
        return [w for i, t in enumerate(tree[2]) for w in words(t, f"{name}[{i}]")]
    return [w for k, t in tree[2] for w in words(t, f"{name}.{k}")]
