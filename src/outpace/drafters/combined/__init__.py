"""Several drafters at once, and the record of how often each is right."""
