"""A VAE's decoder and encoder: time and memory of ways to run them."""
