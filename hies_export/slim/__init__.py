"""TODO slim."""
