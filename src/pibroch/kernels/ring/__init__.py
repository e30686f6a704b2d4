"""Rings of slots in shared memory, into which other processes put messages."""
