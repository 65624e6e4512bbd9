"""The scores of a running model: which pairs it scores, means by position, and the variance of each part."""
