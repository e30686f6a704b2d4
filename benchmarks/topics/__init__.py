"""Benchmark topics, one file each."""
