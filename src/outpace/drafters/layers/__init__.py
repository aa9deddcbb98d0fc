"""Drafters that are some of the layers of the target: early exit, skipped layers."""
