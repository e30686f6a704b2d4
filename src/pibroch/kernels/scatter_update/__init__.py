"""Combine gradients by row and apply an optimizer."""
