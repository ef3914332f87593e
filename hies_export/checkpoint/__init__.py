"""Slim checkpoints: written, read back, and cut on disk."""
