"""Several drafters at once, and the record of how often each one's guesses are right."""
