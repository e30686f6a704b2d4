"""The side that forks: a process that has loaded what its children need.

It has no thread but its own.

What children ask for, memory that outlives them, is done between two looks at whether they still
run.
"""

from __future__ import annotations

import importlib
import logging
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NoReturn

import msgspec

from pibroch.forkserver.child import ChildPlan, ForkedProcess, fork
from pibroch.forkserver.link import adopt
from pibroch.forkserver.memories import Memories
from pibroch.forkserver.messages import Keep, Loaded, receive_request

logger = logging.getLogger(__name__)


def can_fork() -> bool:
    """Whether processes of pibroch may be forked here: only Linux has all that is needed."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


class ForkServer:
    """Forks this process.

    Leaving the ``with`` block forgets the memory; children are their owners' to end.

    Args:
        program: what a child does, by its ``sys.argv`` and ``os.environ``.
        prepare: what else children should find done once modules are imported, step by step.
    """

    def __init__(
        self, program: Callable[[], NoReturn], prepare: Callable[[], Iterator[None]]
    ) -> None:
        self._program = program
        self._prepare = prepare
        self._links: list[socket.socket] = []
        self._memories = Memories()
        self._idle: Iterator[None] = iter(())

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        for link in list(self._links):
            self._let_go(link)
        self.forget()

    def forget(self) -> None:
        """Give all memory up that was kept for processes to come."""
        self._memories.forget()

    def heads(self, num_bytes: int) -> list[bytes]:
        """The first bytes of all memory that is kept."""
        return self._memories.heads(num_bytes)

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules that children need, and prepare the rest.

        What cannot be imported is theirs to say.
        """
        for _ in self._load(modules):
            pass

    def _load(self, modules: Sequence[str]) -> Iterator[None]:
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception as error:  # a user's module may raise anything, to a child as well
                logger.debug("%s is not loaded for processes to come: %r", name, error)
            yield
        yield from self._prepare()

    def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        name: str,
        log: int | None = None,
    ) -> ForkedProcess:
        """A child without input, which may ask this server for things: see :class:`ChildPlan`."""
        # where no memory can be kept, nothing is asked
        kind = socket.SOCK_SEQPACKET if can_fork() else socket.SOCK_STREAM
        own_end, child_end = socket.socketpair(socket.AF_UNIX, kind)
        self._links.append(own_end)
        closed = [*(link.fileno() for link in self._links), *self._memories.descriptors()]
        plan = ChildPlan(arguments, environment, name, closed, log)
        with child_end:
            return fork(plan, partial(_linked, child_end.fileno(), self._program))

    def serve(self, seconds: float) -> None:
        """Do what is asked for in the next so many seconds.

        Returns early where nobody can ask any more.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not self._links:
                time.sleep(left)
                return
            ready, _, _ = select.select(self._links, [], [], left)
            for link in ready:
                self._answer(link)
            if not ready:
                next(self._idle, None)

    def _answer(self, link: socket.socket) -> None:
        try:
            match receive_request(link):
                case None:
                    self._let_go(link)
                case Keep() as request:
                    self._memories.answer(link, request)
                case Loaded(modules):
                    self._idle = self._load([name for name in modules if name not in sys.modules])
        except (OSError, msgspec.DecodeError) as error:
            logger.debug("a child: %s", error)
            self._let_go(link)

    def _let_go(self, link: socket.socket) -> None:
        """It has ended, or has nothing more to say."""
        link.close()
        self._links.remove(link)


def _linked(descriptor: int, program: Callable[[], NoReturn]) -> NoReturn:
    adopt(descriptor)
    program()
