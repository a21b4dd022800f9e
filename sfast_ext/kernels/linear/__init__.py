"""Linear layers fused with what precedes or follows them."""
