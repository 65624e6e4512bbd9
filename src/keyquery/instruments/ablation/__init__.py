"""The change of the loss when parts of heads are ablated."""
