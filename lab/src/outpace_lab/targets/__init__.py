"""Targets of the laboratory."""

from outpace_lab.targets.contrastive import ContrastiveTarget
from outpace_lab.targets.split import SplitTarget

__all__ = ["ContrastiveTarget", "SplitTarget"]
