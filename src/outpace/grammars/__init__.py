"""Grammars of texts: their notations, and the tokens that they allow next."""
