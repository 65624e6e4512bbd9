"""Analyses: a model, or its activations, in; a Reading out. Each has a folder."""
