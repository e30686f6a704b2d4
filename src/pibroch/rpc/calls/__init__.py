"""Requests and notes in both directions, and the threads that handle them."""
