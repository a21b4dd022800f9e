"""Who computes a product on GeForce and A100: `mma_gemm` with one of its tiles, or PyTorch with what follows the
product as a separate kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from sfast_ext.kernels.backend.choices import OWN, Choices, Run
from sfast_ext.kernels.backend.triton_runtime import is_dry_run
from sfast_ext.kernels.linear.mma_tiles import Tile


class MmaChoice:
    """Chooses for one operation, apart for exact sums and for sums in half precision.

    A shape that was not measured is PyTorch's with exact sums; with sums in half precision, for which tensor cores take
    half the time, it is `mma_gemm`'s.

    Args:
        what: the operation's name on disk.
    """

    def __init__(self, what: str, make: Callable[[str], Choices] = Choices) -> None:
        self._exact, self._half_sums = make(what), make(f"{what}, faster sums")

    def run(
        self,
        device: torch.device,
        key: str,
        torchs: Callable[..., Tensor],
        ours: Callable[..., Tensor],
        tiles: list[Tile],
        half_sums: bool,
        residual: Tensor | None = None,
    ) -> Tensor:
        """The result of the chosen one. In a dry run, in which kernels are compiled ahead, all are launched.

        Args:
            key: the sizes.
            ours: takes `tile` and `half_sums`.
            tiles: those that `ours` may have.
            residual: what `torchs` and `ours` take by this name, and overwrite.
        """
        ways: dict[str, Callable[..., Tensor]] = {OWN: torchs}
        ways.update({str(tile): functools.partial(ours, tile=tile, half_sums=half_sums) for tile in tiles})
        expected = str(tiles[0]) if half_sums else OWN
        runs, trials = ways, None
        if residual is not None:
            runs = {name: functools.partial(way, residual=residual) for name, way in ways.items()}
            trials = {name: repeatable(way, residual) for name, way in ways.items()}
        if is_dry_run():
            return [run() for run in runs.values()][-1]
        own = runs.pop(OWN)
        chooser = self._half_sums if half_sums else self._exact
        return chooser.run(device, key, own, runs, expected, trials=trials)


def repeatable(way: Callable[..., Tensor], residual: Tensor) -> Run:
    """A way that may run repeatedly: the first time onto a copy, which stays the caller's, then always onto another."""
    copies: list[Tensor] = []

    def run() -> Tensor:
        if len(copies) < 2:
            copies.append(residual.clone())
        return way(residual=copies[-1])

    return run


def key(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """The sizes of a linear layer, for `MmaChoice.run`: rows, columns and terms of a sum."""
    kind = str(x.dtype).removeprefix("torch.")
    return f"{x.numel() // x.shape[-1]}x{weight.shape[0]}x{x.shape[-1]} {kind}{', bias' * (bias is not None)}"
