"""Engines: each executes batches over a bundle, behind the protocol in base.py."""
