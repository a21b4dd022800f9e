"""A module's forward as a graph."""
