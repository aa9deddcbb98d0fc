"""Training of learned drafters: data, objectives, the loop, and the metric that counts."""
