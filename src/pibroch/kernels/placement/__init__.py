"""Give partitions homes and copies."""
