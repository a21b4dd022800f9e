"""What each Triton compiles for each card: `python -m benchmarks.compile_table`."""
