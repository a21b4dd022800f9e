"""Linear layers on 8-bit operands, and what makes these of half precision."""
