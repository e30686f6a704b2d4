"""Exponential moving averages of rows, kept up lazily."""
