"""Prepare and Measure: work that a user starts from the tab or the API, and may cancel."""
