"""Group normalization, with what comes before it."""
