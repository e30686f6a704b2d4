"""From an address to messages with their tensors: sockets, shared memory, handshakes, and who is there."""
