"""Typed run configuration and recipes."""
