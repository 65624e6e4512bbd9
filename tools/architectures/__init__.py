"""Architectures for developers: a search for the TOML of a model type, and proofs of all types."""
