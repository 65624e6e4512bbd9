"""Tools of the developers, which the wheel does not hold."""
