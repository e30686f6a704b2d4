"""Numbers in shared memory that only grow, and waiting for them."""
