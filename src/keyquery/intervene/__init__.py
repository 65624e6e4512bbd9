"""Undoable interventions on a live model: dial, project, swap."""
