"""Many ways to prune one model, judged side by side."""
