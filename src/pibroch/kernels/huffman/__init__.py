"""Bytes of uneven frequency in few bits."""
