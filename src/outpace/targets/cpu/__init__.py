"""Steps on a CPU: kernels of linear layers, fused layers and attention whose rows keep their bits."""
