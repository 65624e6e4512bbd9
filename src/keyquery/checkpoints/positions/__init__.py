"""What positions add to scores: in a sequence, on a grid, and by vectors of their own."""
