"""What processes need of each other below messages: sockets, proofs, shared memory, liveness."""
