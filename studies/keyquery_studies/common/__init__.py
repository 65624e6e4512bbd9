"""What several studies share: the store and runner of results, their rows, language models and objectives."""
