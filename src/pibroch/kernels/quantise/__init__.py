"""Rows of bytes: how they are made, and how they are looked up where they lie."""
