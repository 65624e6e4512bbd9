"""Changes to a live model, and the way back: dial, project, swap."""
