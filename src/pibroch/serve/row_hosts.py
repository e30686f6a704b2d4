"""Hosts that hold parts of the tables, as the one that scores asks them.

See :mod:`pibroch.serve.parts`. A request is sent when it is made; hosts and the caller work at the
same time. Every wait ends by ``parts.ANSWER_TIMEOUT_S``.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import urlsplit

from pibroch.errors import ConfigError, RpcTimeoutError, WorkerLostError
from pibroch.kernels.arrays import Ints
from pibroch.rpc.info import WorkerInfo
from pibroch.rpc.rows import Reading, RowWorker
from pibroch.rpc.values.messages import encode
from pibroch.serve.parts import ANSWER_TIMEOUT_S, Part, WantedRows

_LEFT_ALONE_S = 1.0  # after it did not answer at all, in which nobody waits for it again


@dataclass(frozen=True, slots=True)
class RowAccess:
    """How hosts let each other in.

    Attributes:
        secret: of all of them.
        tls: files of a certificate, its key and the authorities; plain TCP where absent.
        port: at which a host with a part listens for others; 0 for any that is free.
    """

    secret: bytes = field(repr=False)
    tls: tuple[str, str, str] | None = None
    port: int = 0


class RowHost:
    """A host that holds a part of the rows; asked from any thread.

    Args:
        address: ``host:port``.
        info: that it proves to have.
        worker: of this process, which reads.
    """

    def __init__(self, address: str, info: WorkerInfo, worker: RowWorker) -> None:
        self.address = address
        self.worker = worker
        self._info = info
        self._lost: tuple[float, str] = (0.0, "")

    def read(self, sha256: str, rows: Ints) -> Reading:
        """Ask for rows ``[V]`` of an export; returns at once, from any thread.

        They come as bytes, one behind the other, or WorkerLostError does, within
        ``ANSWER_TIMEOUT_S``. It is raised for a host that has just not answered.

        Args:
            sha256: checksum of the export.
            rows: ids among those of all tables.
        """
        until, reason = self._lost
        if time.monotonic() < until:
            raise WorkerLostError(self.address, reason)
        how = ANSWER_TIMEOUT_S, self._explained
        return self.worker.read(self._info, _wanted(sha256), [rows], *how)

    def _explained(self, error: BaseException) -> BaseException:
        """Name the host as users know it; one that does not answer is left alone for a moment."""
        reason = str(error) or type(error).__name__
        if isinstance(error, RpcTimeoutError):
            reason = f"no answer within {ANSWER_TIMEOUT_S:g} s"
            self._lost = time.monotonic() + _LEFT_ALONE_S, reason
        elif isinstance(error, WorkerLostError):
            reason = error.reason
        lost = WorkerLostError(self.address, reason)
        lost.__cause__ = error
        return lost


@lru_cache(maxsize=8)
def _wanted(sha256: str) -> bytes:
    return encode(WantedRows(sha256))


def row_hosts(addresses: Sequence[str], access: RowAccess) -> tuple[RowHost, ...]:
    """The hosts of all parts, in the order of the parts.

    Raises:
        ConfigError: for what is no address, or one twice.
    """
    if len(set(addresses)) != len(addresses):
        raise ConfigError(f"--rows-at {' '.join(addresses)}"[:200], "another host for each part")
    places = {
        WorkerInfo(Part(number, len(addresses)).worker, number): parsed_address(address)
        for number, address in enumerate(addresses, 1)
    }
    # beside those of parts
    me = WorkerInfo("rows:scoring", (1 << 32) + secrets.randbits(32))
    if not places:
        return ()
    worker = RowWorker(me, access.secret, places, tls=access.tls)
    return tuple(
        RowHost(address, info, worker) for address, info in zip(addresses, places, strict=True)
    )


def parsed_address(address: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        ConfigError: for another form.

    >>> parsed_address("[::1]:8001")
    ('::1', 8001)
    """
    try:
        parts = urlsplit(f"//{address}")
        host = parts.hostname
        port = parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.netloc != address or "@" in address:
        raise ConfigError(
            f"--rows-at {address}", "a host and the port of its rows", "say e.g. 10.0.0.2:8001"
        )
    return host, port


def when_read(
    loop: asyncio.AbstractEventLoop, answers: Sequence[Reading], then: Callable[[], None]
) -> None:
    """Call a function in a loop's thread when all answers are there, or have failed."""
    num_open = len(answers)

    def one_more() -> None:
        nonlocal num_open
        num_open -= 1
        if num_open == 0:
            then()

    def note() -> None:
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is loop:
            one_more()
        else:
            loop.call_soon_threadsafe(one_more)

    if not answers:
        then()
    for answer in answers:
        answer.when_done(note)
