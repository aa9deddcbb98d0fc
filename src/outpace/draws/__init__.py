"""Which token, with which noise: draws from a row, from many rows, and at the nodes of a draft."""
