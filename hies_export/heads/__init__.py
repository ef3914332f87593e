"""Where a model's attention heads are, and what they do while it runs."""
