"""Attention, and the projection of its queries."""
