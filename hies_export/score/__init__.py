"""TODO score."""
