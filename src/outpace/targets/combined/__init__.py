"""A target that runs one model in two parts, its first layers and the others."""
