"""Homes of single rows."""
