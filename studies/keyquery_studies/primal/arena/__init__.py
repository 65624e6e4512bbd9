"""Tasks of the Long Range Arena: two generators, two real datasets, and the model."""
