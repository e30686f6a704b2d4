"""From an address to messages with their tensors.

Sockets, shared memory, handshakes, and who is there.
"""
