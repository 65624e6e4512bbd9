"""Study `rerank`."""
