"""Products of 8 bits, and the kernels that write their operands."""
