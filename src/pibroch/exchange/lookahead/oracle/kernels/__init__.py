"""Bookkeeping of the oracle, and numbers as few bytes."""
