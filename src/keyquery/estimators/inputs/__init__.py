"""Data as users have them, to tensors as networks want them."""
