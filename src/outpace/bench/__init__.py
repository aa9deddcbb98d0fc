"""Tasks to measure drafters on."""
