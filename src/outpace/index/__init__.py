"""Data structures that drafters look tokens up in. No model, no torch."""
