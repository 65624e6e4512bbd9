"""Validation and conversion of user data to tensors."""
