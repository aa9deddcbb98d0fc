"""Which step runs here, and the test of it against the model."""
