"""Matrix products with what comes before or after them."""
