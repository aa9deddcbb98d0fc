"""Datastores: files of texts that are searched for the continuations of another text."""
