"""TODO ui."""
