"""TODO stream."""
