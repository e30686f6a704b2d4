"""The side that was forked, or started by who keeps memory.

It asks for memory that outlives this process.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
import threading
from dataclasses import dataclass

from pibroch.errors import ProtocolError
from pibroch.forkserver.messages import Keep, Loaded, receive_answer, send

LINK = "PIBROCH_LINK"
"""The descriptor by which a process that was started anew asks who has started it."""
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class KeptMemory:
    """Memory that stays when this process ends.

    Attributes:
        memory: to read and to write.
        is_new: whether it was made just now, of zeros.
        tag: what it is for.
    """

    memory: mmap.mmap
    is_new: bool
    tag: str


class Link:
    """To the server. Threads may ask at once."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._loaded_before = frozenset((*sys.modules, "__main__"))
        link.settimeout(_TIMEOUT_S)

    def keep(self, key: str, tag: str, num_bytes: int) -> KeptMemory:
        """Memory of this name, tag and size.

        What is there, or new one in place of what has another tag or size.
        """
        memory = self._keep(Keep(key, tag, num_bytes))
        assert memory is not None, "it is made"
        return memory

    def kept(self, key: str) -> KeptMemory | None:
        """Memory of this name, if there is some."""
        return self._keep(Keep(key, "", 0))

    def say_loaded(self) -> None:
        """Have processes to come find loaded what this one has loaded."""
        fresh = [name for name in sys.modules if name not in self._loaded_before]
        with self._lock:
            send(self._link, Loaded(fresh))

    def _keep(self, request: Keep) -> KeptMemory | None:
        """What the server answers.

        Raises:
            ProtocolError: when it is gone.
        """
        try:
            with self._lock:
                send(self._link, request)
                answer, descriptors = receive_answer(self._link)
        except OSError as error:
            raise ProtocolError(
                f"no answer of the process that started this one: {error}", "it alive"
            ) from error
        if not answer.num_bytes:
            return None
        try:
            return KeptMemory(
                mmap.mmap(descriptors[0], answer.num_bytes), answer.is_new, answer.tag
            )
        finally:
            os.close(descriptors[0])


_link: Link | None = None


def adopt(descriptor: int) -> None:
    """In a process that was just forked: this is its link to the server."""
    global _link
    _link = Link(socket.socket(fileno=os.dup(descriptor)))


def link_to_server() -> Link | None:
    """To who has forked or started this process, and keeps memory for it.

    ``None`` for a process that was started otherwise.
    """
    descriptor = os.environ.pop(LINK, None)
    if descriptor is not None:
        adopt(int(descriptor))
    return _link
