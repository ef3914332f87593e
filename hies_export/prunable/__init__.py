"""TODO prunable."""
