"""Inputs like those of a recorded call, at another size and batch: to prepare and to measure what no image asked for
yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from sfast_ext.call_signature import Signature, rebuild_call

TIMESTEP = 500
"""In the middle of the steps. Which one it is changes neither plan nor time."""
LEVELS = 5
"""A UNet halves the sides of its latent fewer times."""
LATENT_CHANNELS = 16
"""No latent has more channels."""


class UnknownInput(Exception):
    """The call has an input whose shape at another size is not known. The message names it."""


class ExampleCall:
    """Makes calls like a recorded one.

    Args:
        signature: that of the recorded call.

    Raises:
        UnknownInput: it has no latent.
    """

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        latent = next((s for s in signature.shapes() if len(s) == 4 and s[1] <= LATENT_CHANNELS), None)
        if latent is None:
            raise UnknownInput("the model is not called with a latent")
        self.rows, self.height, self.width = latent[0], latent[2], latent[3]
        """Of the recorded latent."""
        self._prompt = next((s[:2] for s in signature.shapes() if len(s) == 3), None)
        self.tokens = None if self._prompt is None else self._prompt[1]
        """Of the recorded prompt; None if it has none."""

    def inputs(
        self, height: int, width: int, rows: int, device: torch.device, tokens: int | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments for a latent of this size. Torch's own random state is left alone.

        Args:
            tokens: those of the prompt; None: as many as were recorded.

        Raises:
            UnknownInput: the shape of an input at that size is not known.
        """
        generator = torch.Generator().manual_seed(0)
        leaves: dict[int, Any] = {}
        for path, leaf in _leaves(self._signature.tree, ""):
            if leaf[0] == "number":
                leaves[leaf[2]] = leaf[1](TIMESTEP)
            else:
                shape = self._shape(path, leaf[2], height, width, rows, tokens)
                order = leaf[3] if len(leaf) == 5 else ()
                leaves[leaf[-1]] = _in_order(_values(shape, leaf[1], generator), order).to(device)
        made = self._signature.joined([leaves[index] for index in range(len(leaves))])
        return rebuild_call(self._signature.tree, made)

    @contextlib.contextmanager
    def surroundings(self) -> Iterator[None]:
        """The modes of torch that the recorded call was made under."""
        with contextlib.ExitStack() as modes:
            modes.enter_context(torch.no_grad())
            if self._signature.mode:
                kind, dtype = self._signature.mode
                modes.enter_context(torch.autocast(kind, dtype=dtype))
            else:
                for kind in ("cuda", "cpu"):
                    modes.enter_context(torch.autocast(kind, enabled=False))
            yield

    def _shape(
        self, path: str, shape: tuple[int, ...], height: int, width: int, rows: int, tokens: int | None
    ) -> tuple[int, ...]:
        if not shape:
            return shape
        if shape[0] not in (1, self.rows):
            raise UnknownInput(f"the size of {path} {list(shape)} does not follow from that of the image")
        first = rows if shape[0] == self.rows else 1
        if len(shape) != 4:
            # a mask of the prompt has no third side
            if tokens is not None and len(shape) in (2, 3) and shape[:2] == self._prompt:
                return (first, tokens, *shape[2:])
            return (first, *shape[1:])
        for level in range(LEVELS):
            if shape[2:] == (_halved(self.height, level), _halved(self.width, level)):
                return (first, shape[1], _halved(height, level), _halved(width, level))
        raise UnknownInput(f"the size of {path} {list(shape)} does not follow from that of the image")


def _halved(side: int, times: int) -> int:
    return -(-side // (1 << times))


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers of a signature's tree, with their names."""
    tag = tree[0]
    if tag in ("tensor", "number"):
        yield path, tree
    elif tag == "call":
        for index, each in enumerate(tree[1]):
            yield from _leaves(each, f"argument {index}")
        for name, each in tree[2]:
            yield from _leaves(each, name)
    elif tag in ("tuple", "list"):
        for index, each in enumerate(tree[2]):
            yield from _leaves(each, f"{path}[{index}]")
    elif tag in ("data", "dict"):
        for name, each in tree[2]:
            yield from _leaves(each, f"{path}.{name}")


def _in_order(value: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """A tensor with these dimensions from the outermost to the innermost in memory. Others are outside of them."""
    dims = [*(d for d in range(value.dim()) if d not in order), *order]
    return value.permute(dims).contiguous().permute([dims.index(d) for d in range(value.dim())])


def _values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if len(shape) <= 1 and dtype is not torch.bool:
        return torch.full(shape, TIMESTEP, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.ones(shape, dtype=dtype)
