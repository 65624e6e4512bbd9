"""Re-rankers of retrieval lists, learned and training-free."""
