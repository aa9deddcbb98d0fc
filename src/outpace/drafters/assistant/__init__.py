"""Assistants that attend to the target's own keys and values: Gemma 4's."""
