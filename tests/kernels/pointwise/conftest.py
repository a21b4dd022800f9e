"""Where kernels in CUDA C++ alone run."""

from kernels.eight_bits.conftest import quantiser_device as cuda_device

__all__ = ["cuda_device"]
