"""Whole images in a real WebUI: seconds with the extension and without, and what they are made of."""
