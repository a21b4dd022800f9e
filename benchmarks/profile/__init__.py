"""Where the time of one replay goes: `python -m benchmarks.profile`."""
