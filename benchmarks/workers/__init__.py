"""Contenders: one file each, run as ``python -m benchmarks.workers NAME`` in the environment that has what it needs."""
