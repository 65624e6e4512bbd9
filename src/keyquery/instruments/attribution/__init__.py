"""Which writes into the residual stream make a head attend where it does."""
