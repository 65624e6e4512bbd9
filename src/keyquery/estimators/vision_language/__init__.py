"""VisualParser: images and captions."""
