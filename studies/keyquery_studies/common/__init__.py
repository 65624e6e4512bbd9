"""What several studies share: jobs, rows of results, language models and their objectives."""
