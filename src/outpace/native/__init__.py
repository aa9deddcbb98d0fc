"""Functions in C: their compilation on this machine, the gate for pointers, and one module per source."""
