"""Retrieval from a datastore."""
