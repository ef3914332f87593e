"""TODO hub."""
