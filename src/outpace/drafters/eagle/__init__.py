"""EAGLE: a decoder layer that continues the target's hidden states."""
