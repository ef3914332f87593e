"""TODO runtimes."""
