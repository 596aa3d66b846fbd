"""Measurements of a bundle through the same loop that serves it."""
