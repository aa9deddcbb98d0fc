"""Modules, batches, losses and folders that trained drafters and their training share."""
