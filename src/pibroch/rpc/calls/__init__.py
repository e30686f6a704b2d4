"""Requests and notes: what this worker asks of others, what they ask of it, and the threads that run it."""
