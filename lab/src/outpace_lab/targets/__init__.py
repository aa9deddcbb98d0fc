"""Targets of the laboratory."""

from outpace_lab.targets.contrastive import ContrastiveTarget

__all__ = ["ContrastiveTarget"]
