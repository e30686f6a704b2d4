"""Group equal row ids, so that each row is updated once."""
