"""What all displays share: colours, tables, figures, and the frame of a page."""
