"""Count accesses to rows, and the batches in which they occur."""
