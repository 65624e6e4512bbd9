"""Configs of models: defaults that they leave out, and the tensors of their sections."""
