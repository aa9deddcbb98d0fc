"""Parallel decoding of the target itself: Jacobi iteration and lookahead."""
