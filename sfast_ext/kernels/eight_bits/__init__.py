"""Products of 8-bit integers: what makes their operands, and the products themselves."""
