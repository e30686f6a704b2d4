"""A small number for each address that is in use, of many that are not."""
