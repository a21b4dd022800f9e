"""How kernels are compiled, launched and chosen."""
