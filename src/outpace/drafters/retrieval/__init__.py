"""Retrieval from a datastore, and the files that a datastore consists of."""
