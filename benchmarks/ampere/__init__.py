"""The kernels for tensor cores of Ampere and later, next to those that NVIDIA's libraries have for Ampere."""
