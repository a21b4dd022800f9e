"""Each kernel beside PyTorch's operations and torch.compile: `python -m benchmarks.kernels`."""
