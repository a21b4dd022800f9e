"""Convolutions and the upsampling before them."""
