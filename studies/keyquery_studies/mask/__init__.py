"""Study `mask`: what the objective, the attention mask and the position encoding each do to the heads."""
