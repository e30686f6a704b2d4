"""From an address to messages with tensors: sockets, shared memory, handshakes, membership."""
