"""The kernels for tensor cores of Ampere and later, beside those that NVIDIA's libraries have for Ampere."""
