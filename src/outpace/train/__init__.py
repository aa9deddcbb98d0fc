"""Making drafters for a user's own target and texts."""
