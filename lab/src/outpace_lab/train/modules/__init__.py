"""The modules of outpace's drafters, as they learn."""
