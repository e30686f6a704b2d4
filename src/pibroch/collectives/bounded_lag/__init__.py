"""Bounded lag: all-to-all among ranks of which some may be k requests ahead of others; see the README."""
