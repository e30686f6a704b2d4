"""Queues of messages in shared memory between two processes each, of any length."""
