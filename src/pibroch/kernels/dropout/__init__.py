"""Dropout whose mask is a function of numbers, not of a generator's state."""
