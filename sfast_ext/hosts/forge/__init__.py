"""Forge Neo and Forge Classic."""
