"""Retrieval from a datastore, and the datastore's file format."""
