"""Where queries and keys of a running model can be rewritten."""
