"""Group norm, also fused with the operation before it."""
