"""A stand-in of flash_attn 2 for tests: its names and signatures over an extension that takes real memory only."""

from .flash_attn_interface import (  # noqa: F401
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
