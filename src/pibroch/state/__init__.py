"""A table's rows at a moment, and every form in which they are kept."""
