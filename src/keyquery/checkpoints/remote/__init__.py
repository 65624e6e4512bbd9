"""Models of a hub: names, downloads, and the cache."""
