"""Multi-token prediction: the prediction layers of the target's own checkpoint."""
