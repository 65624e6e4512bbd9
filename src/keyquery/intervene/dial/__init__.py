"""Parts of scores scaled in a running model."""
