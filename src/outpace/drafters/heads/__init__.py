"""Drafters that are heads on the target: Medusa, Hydra."""
