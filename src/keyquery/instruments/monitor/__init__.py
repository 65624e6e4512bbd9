"""A training monitor: attention logits, entropy, sinks and the QK form of every head, while a model trains."""
