"""The drafter with a language model of its own."""
