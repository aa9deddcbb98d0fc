"""Drafters of the laboratory."""
