"""EAGLE: a decoder layer that goes on from the hidden states of the target."""
