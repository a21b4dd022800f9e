"""Elementwise operations and normalizations of rows."""
