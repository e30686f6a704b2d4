"""Times of tasks that wait for each other."""
