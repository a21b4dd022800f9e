"""Runs the kernels' GPU tests under NVIDIA's compute-sanitizer: out-of-bounds and misaligned accesses, shared-memory
races, wrong barriers."""
