"""Tasks of the Long Range Arena: two generators, two real corpora, and the model that is trained on them."""
