from . import fmha  # noqa: F401
from .fmha import (  # noqa: F401
    AttentionBias,
    LowerTriangularMask,
    MemoryEfficientAttentionCutlassOp,
    MemoryEfficientAttentionFlashAttentionOp,
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)
