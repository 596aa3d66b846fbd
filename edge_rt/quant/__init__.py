"""From a float checkpoint to a quantized one: calibrate, choose, round, write."""
