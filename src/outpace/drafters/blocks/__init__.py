"""Drafters that draft a block in one forward: DFlash, SpecDec, parallel tokens."""
