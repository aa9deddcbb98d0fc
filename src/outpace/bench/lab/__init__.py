"""Measurements around the benchmark: models grown to a size, scaling laws, rooflines, GGUF files."""
