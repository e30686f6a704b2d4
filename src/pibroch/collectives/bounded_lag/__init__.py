"""Bounded lag: all-to-all among ranks of which some may be k requests ahead of others.

See the README.
"""
