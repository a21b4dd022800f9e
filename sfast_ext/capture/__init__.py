"""Capture: the forward of a module as an FX graph."""
