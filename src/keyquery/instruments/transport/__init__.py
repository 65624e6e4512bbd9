"""Training as transport of points, beside optimal transport."""
