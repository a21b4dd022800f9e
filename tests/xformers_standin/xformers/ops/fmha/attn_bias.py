"""Biases that are no tensors."""

from __future__ import annotations

import torch


class AttentionBias:
    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        raise NotImplementedError


class LowerTriangularMask(AttentionBias):
    """Causal, aligned at the top left."""

    def __init__(self, *tensor_args, **tensor_kwargs):
        super().__init__()

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        return torch.full(shape, float("-inf"), dtype=dtype, device=device).triu(1)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    def __init__(self, bias):
        self._bias = bias

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        return super().materialize(shape, dtype, device) + self._bias


class BlockDiagonalMask(AttentionBias):
    """Sequences of the given lengths, one after another in one row of a batch; each attends to itself."""

    def __init__(self, lengths):
        self.lengths = list(lengths)

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None):
        assert kv_seqlen in (None, q_seqlen)
        return cls(q_seqlen)

    def materialize(self, shape, dtype=torch.float32, device="cpu"):
        blocks = torch.block_diag(*[torch.ones(n, n) for n in self.lengths])
        return blocks.to(device).log().to(dtype).expand(shape)
