"""Drafters that use some of the target's layers: early exit, skipped layers."""
