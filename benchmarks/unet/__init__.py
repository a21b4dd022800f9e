"""One UNet call, several ways to run it: `python -m benchmarks.unet`, and the README's table of it."""
