"""From a quantized checkpoint and a recipe to a bundle, one file per engine."""
