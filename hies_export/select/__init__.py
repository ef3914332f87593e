"""TODO select."""
