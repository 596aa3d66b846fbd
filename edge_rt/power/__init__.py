"""What the machine measures of itself."""
