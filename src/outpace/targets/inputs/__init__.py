"""What a transformers model's forward is given, and what may not be given to it."""
