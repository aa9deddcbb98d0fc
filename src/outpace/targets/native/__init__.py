"""Decoders that are computed by one call into C, on a CPU: a family's recipe, its weights, the runner."""
