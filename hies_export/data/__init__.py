"""Rows in, tensor batches out."""
