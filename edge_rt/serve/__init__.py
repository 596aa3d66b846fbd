"""The daemon: HTTP in front, the loop behind."""
