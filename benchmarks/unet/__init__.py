"""One UNet call, several ways to run it: `python -m benchmarks.unet`, and the table of docs/measurements.md."""
