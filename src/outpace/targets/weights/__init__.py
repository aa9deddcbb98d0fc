"""Weights by name: a model's files, adapters, and the memory they need."""
