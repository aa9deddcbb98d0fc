"""Drafters with a language model of their own: a draft model, cascades."""
