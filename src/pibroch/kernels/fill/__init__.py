"""Random fills of tables."""
