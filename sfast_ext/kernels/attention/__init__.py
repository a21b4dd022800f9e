"""Attention, and its fusion with the projection of queries."""
