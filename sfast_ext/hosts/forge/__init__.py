"""Forge Neo."""
