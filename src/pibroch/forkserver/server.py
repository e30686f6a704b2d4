"""The side that forks: a process that has loaded what its children need.

It has no thread but its own.

What children ask for (other processes, memory that outlives them) is done between two looks at
whether they still run.
"""

from __future__ import annotations

import importlib
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import msgspec

from pibroch.forkserver.child import ChildPlan, ForkedProcess, fork
from pibroch.forkserver.link import adopt
from pibroch.forkserver.messages import (
    ExitState,
    Keep,
    KeptDescriptor,
    Loaded,
    Request,
    Signal,
    Started,
    StartProcess,
    receive_request,
    send,
)
from pibroch.title import name_of_role

logger = logging.getLogger(__name__)
_DEV_NULL = os.devnull


def can_fork() -> bool:
    """Whether processes of pibroch may be forked here: only Linux has all that is needed."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


@dataclass(slots=True)
class _Child:
    process: ForkedProcess
    link: socket.socket | None
    started: dict[int, _Child] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Memory:
    descriptor: int
    tag: str
    num_bytes: int


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
        self._children: list[_Child] = []
        self._memories: dict[str, _Memory] = {}
        self._idle: Iterator[None] = iter(())

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        for child in list(self._children):
            self._let_go(child)
        self.forget()

    def forget(self) -> None:
        """Give all memory up that was kept for processes to come."""
        for memory in self._memories.values():
            os.close(memory.descriptor)
        self._memories.clear()

    def heads(self, num_bytes: int) -> list[bytes]:
        """The first bytes of all memory that is kept."""
        return [os.pread(memory.descriptor, num_bytes, 0) for memory in self._memories.values()]

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules that children need, and prepare the rest.

        What cannot be imported is theirs to say.
        """
        for _ in self._load(modules):
            pass

    def _load(self, modules: Sequence[str]) -> Iterator[None]:
        for name in modules:
            with suppress(Exception):
                importlib.import_module(name)
            yield
        yield from self._prepare()

    def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], name: str
    ) -> ForkedProcess:
        """A child with this process's output and no input, which may ask this server for things."""
        nothing = os.open(_DEV_NULL, os.O_RDONLY)
        try:
            child = self._fork(arguments, environment, name, {0: nothing})
        finally:
            os.close(nothing)
        self._children.append(child)
        return child.process

    def serve(self, seconds: float) -> None:
        """Do what is asked for in the next so many seconds.

        Returns early where nobody can ask any more.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            links = {child.link: child for child in self._all() if child.link is not None}
            if not links:
                time.sleep(left)
                return
            ready, _, _ = select.select(list(links), [], [], left)
            for link in ready:
                self._answer(links[link])
            if not ready:
                next(self._idle, None)

    def _all(self) -> list[_Child]:
        return [each for child in self._children for each in (child, *child.started.values())]

    def _answer(self, child: _Child) -> None:
        if child.link is None:  # one that was answered before it has ended, and this one with it
            return
        try:
            request = receive_request(child.link)
            if request is None:
                self._let_go(child)
            else:
                self._do(child, child.link, request)
        except (OSError, msgspec.DecodeError) as error:
            logger.debug("process %d: %s", child.process.pid, error)
            self._let_go(child)

    def _let_go(self, child: _Child) -> None:
        """It has ended, or has nothing more to say: what it has started ends, too."""
        if child.link is not None:
            child.link.close()
            child.link = None
        for other in child.started.values():
            other.process.kill()
            self._let_go(other)
        if child in self._children:
            self._children.remove(child)

    def _do(self, child: _Child, link: socket.socket, request: Request) -> None:
        match request:
            case StartProcess():
                self._start(child, link, request)
            case Signal(pid, number):
                process = child.started[pid].process if pid in child.started else None
                if process is not None and number:
                    process.send_signal(number)
                send(link, ExitState(signal.SIGKILL if process is None else process.poll()))
            case Keep():
                self._keep(link, request)
            case Loaded(modules):
                self._idle = self._load([name for name in modules if name not in sys.modules])

    def _start(self, child: _Child, link: socket.socket, request: StartProcess) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        log = os.open(request.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            streams = {0: theirs_in, 1: theirs_out, 2: log}
            arguments = request.arguments
            name = name_of_role(arguments[0], arguments[arguments.index("--number") + 1])
            started = self._fork(arguments, request.environment, name, streams, (ours_in, ours_out))
            child.started[started.process.pid] = started
            send(link, Started(started.process.pid), [ours_in, ours_out])
        finally:
            for descriptor in (theirs_in, ours_in, ours_out, theirs_out, log):
                os.close(descriptor)

    def _keep(self, link: socket.socket, request: Keep) -> None:
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

    def _fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        name: str,
        streams: Mapping[int, int],
        closed: Sequence[int] = (),
    ) -> _Child:
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        others = [each.link.fileno() for each in self._all() if each.link is not None]
        memories = [memory.descriptor for memory in self._memories.values()]
        plan = ChildPlan(
            arguments,
            environment,
            name,
            streams,
            (*closed, *others, *memories, own_end.fileno()),
            leads_session=bool(closed),
        )
        try:
            return _Child(fork(plan, partial(_linked, child_end.fileno(), self._program)), own_end)
        finally:
            child_end.close()


def _linked(descriptor: int, program: Callable[[], NoReturn]) -> NoReturn:
    adopt(descriptor)
    program()
