"""A stand-in of SageAttention for tests: as version 1 it writes to its keys, as version 2 it has further functions."""

from .core import sageattn, sageattn_qk_int8_pv_fp16_cuda, sageattn_varlen  # noqa: F401
