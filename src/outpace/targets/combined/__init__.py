"""Targets made of more or less than one model."""
