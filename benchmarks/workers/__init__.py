"""Contenders, one file each.

Run as ``python -m benchmarks.workers NAME`` in the environment that has what they need.
"""
