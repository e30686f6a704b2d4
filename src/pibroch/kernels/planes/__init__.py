"""Numbers as planes of bytes."""
