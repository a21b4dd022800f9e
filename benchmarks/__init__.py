"""Measurements and long runs, each with the script that makes it."""
