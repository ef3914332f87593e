"""Count and time models, on whatever runtime they are served."""
