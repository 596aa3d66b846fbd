"""What the daemon says of itself: counts, times, and who is told."""
