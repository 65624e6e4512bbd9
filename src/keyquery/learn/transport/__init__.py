"""Movement of points during training, compared with optimal transport."""
