"""TODO cost."""
