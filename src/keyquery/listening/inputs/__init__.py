"""What a model is run on, and the model itself: text as batches, tokens, words, models loaded from files."""
