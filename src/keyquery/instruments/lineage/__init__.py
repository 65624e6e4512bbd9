"""`lineage`: whether two models share weights, from queries and keys alone."""
