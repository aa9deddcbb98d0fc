"""Functions in C: carried by a wheel or compiled here, the gate for pointers, and one module per source."""
