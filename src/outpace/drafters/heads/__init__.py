"""Drafters that are heads on the target: blockwise, Medusa, Hydra."""
