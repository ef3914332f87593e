"""What HIES is compared with that does not remove whole heads: judged by what the model would compute, never cut."""
