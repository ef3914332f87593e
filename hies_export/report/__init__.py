"""The report of a run, and everything readable that is rendered from it."""
