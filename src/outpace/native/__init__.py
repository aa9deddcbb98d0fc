"""Functions in C: those of the wheel, compilation on this machine, the gate for pointers, and one module per source."""
