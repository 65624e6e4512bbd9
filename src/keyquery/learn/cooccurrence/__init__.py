"""Co-occurrence of words, and the attention that follows from it."""
