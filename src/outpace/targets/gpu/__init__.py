"""Steps on a GPU: fixed shapes, graphs, tree attention and layers whose rows keep their bits."""
