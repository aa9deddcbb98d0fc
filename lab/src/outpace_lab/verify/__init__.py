"""Verifiers of the laboratory."""
