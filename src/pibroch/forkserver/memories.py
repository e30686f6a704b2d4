"""Memory by name that stays when the processes end that have asked for it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from pibroch.forkserver.messages import Keep, KeptDescriptor, send


@dataclass(frozen=True, slots=True)
class _Memory:
    descriptor: int
    tag: str
    num_bytes: int


class Memories:
    """What this process keeps for others."""

    def __init__(self) -> None:
        self._memories: dict[str, _Memory] = {}

    def forget(self) -> None:
        """Give all up."""
        for memory in self._memories.values():
            os.close(memory.descriptor)
        self._memories.clear()

    def heads(self, num_bytes: int) -> list[bytes]:
        """The first bytes of each."""
        return [os.pread(memory.descriptor, num_bytes, 0) for memory in self._memories.values()]

    def descriptors(self) -> list[int]:
        """Of all."""
        return [memory.descriptor for memory in self._memories.values()]

    def answer(self, link: socket.socket, request: Keep) -> None:
        """Give what is asked for to a process.

        Raises:
            OSError: when it is gone.
        """
        memory = self._memories.get(request.key)
        is_new = False
        if request.num_bytes and (
            memory is None or (memory.tag, memory.num_bytes) != (request.tag, request.num_bytes)
        ):
            if memory is not None:
                os.close(memory.descriptor)
            descriptor = os.memfd_create(f"pibroch {request.key}", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, request.num_bytes)
            memory = self._memories[request.key] = _Memory(
                descriptor, request.tag, request.num_bytes
            )
            is_new = True
        if memory is None:
            send(link, KeptDescriptor(0, False, ""))
        else:
            send(link, KeptDescriptor(memory.num_bytes, is_new, memory.tag), [memory.descriptor])
