"""Ways to see and to hold a torch model without changing it."""
