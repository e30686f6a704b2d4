"""Queues, rings and numbers in memory that processes share."""
