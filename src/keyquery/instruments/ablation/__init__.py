"""What a model loses without parts of its heads."""
