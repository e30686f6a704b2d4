"""Measurements of pibroch beside its peers; see README.md for how and why."""
