"""Modules, batches, losses and folders shared by trained drafters and their training."""
