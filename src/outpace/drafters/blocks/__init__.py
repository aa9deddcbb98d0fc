"""Drafters that draft a block in one forward: DFlash."""
