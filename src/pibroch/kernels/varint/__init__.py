"""Rising numbers in few bytes."""
