"""Rows into messages and out of them."""
