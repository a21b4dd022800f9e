"""Products of 8-bit integers: what makes their operands, and the products themselves."""

MIN_CAPABILITY = (7, 5)
"""The first compute capability whose tensor cores multiply 8-bit integers."""
