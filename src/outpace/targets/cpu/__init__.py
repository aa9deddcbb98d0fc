"""Steps on a CPU: kernels of linear layers, and attention whose rows keep their bits."""
