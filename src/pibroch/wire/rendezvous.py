"""How the ranks of a group get sockets to each other: Unix sockets in a host, TCP between hosts.

Each rank says in the group's store where it listens; the later of two ranks calls the earlier one,
and both prove who they are. The store need not be trusted. At a Unix socket the system also says
whose process is at the other end.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pibroch.errors import AuthenticationError, TrainingError
from pibroch.host import this_machine
from pibroch.wire.admit import Address
from pibroch.wire.handshake_messages import IDLE
from pibroch.wire.ranks import admit_streams, agreed_key, introduce, key_of_run, published_key
from pibroch.wire.sockets import is_own_user, listen

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not export it by name


@dataclass(frozen=True, slots=True)
class ConnectedPeers:
    """The sockets of a rank, connected and blocking, by the rank at the other end.

    Attributes:
        local: Unix sockets.
        remote: TCP, by stream first.
    """

    local: dict[int, socket.socket]
    remote: dict[int, dict[int, socket.socket]]

    def close(self) -> None:
        """Close all sockets."""
        for links in (self.local, *self.remote.values()):
            for link in links.values():
                link.close()


def rendezvous(
    store: Store,
    rank: int,
    size: int,
    timeout_s: float,
    *,
    shares_memory: bool = True,
    streams: Sequence[int] = (0, IDLE),
) -> ConnectedPeers:
    """Connect all ranks of a group, each of which calls this. Blocks.

    Args:
        store: of the group alone.
        rank: of this process.
        size: number of ranks.
        timeout_s: for all to come.
        shares_memory: whether ranks on this host are met at Unix sockets; the same on all ranks of
            a host, where there are streams.
        streams: numbers of the TCP connections to have with each other rank; with :data:`IDLE`,
            ranks of lost hosts can be told from those that are stopped. With none, only ranks that
            share this host's memory are connected.

    Raises:
        TrainingError: when some did not come.
    """
    deadline = time.monotonic() + timeout_s
    own_key = key_of_run()
    if rank == 0:
        store.set("key", published_key(own_key))
    with _listening(shares_memory, bool(streams)) as (servers, here):
        store.set(f"member{rank}", msgspec.json.encode(here).decode())
        members = {
            each: msgspec.json.decode(store.get(f"member{each}"), type=Address)
            for each in range(size)
            if each != rank
        }
        key = agreed_key(own_key, store.get("key").decode())
        wanted = [
            (each, stream)
            for each in sorted(members)
            for stream in ((0,) if _share_memory(here, members[each]) else streams)
        ]
        links: dict[tuple[int, int], socket.socket] = {}
        try:
            for each, stream in wanted:
                # the earlier ones listen already, as they have said where: no two ranks call each
                # other
                if each < rank:
                    links[each, stream] = _call(
                        each, members[each], here, rank, key, stream, deadline
                    )
            later = [(each, stream) for each, stream in wanted if each > rank]
            links |= admit_streams(servers, key, rank, later, deadline)
        except OSError as error:
            absent = sorted({each for each, _ in set(wanted) - set(links)})
            for link in links.values():
                link.close()
            raise TrainingError(
                f"no connection between rank {rank} and ranks {absent}: {error}",
                "all ranks started, each reaching the others",
                "check their logs; between hosts set MASTER_ADDR to an address that all reach, and"
                " open the firewall",
            ) from error
    peers = ConnectedPeers({}, {stream: {} for stream in streams})
    for (each, stream), link in links.items():
        met_at = peers.local if link.family == socket.AF_UNIX else peers.remote[stream]
        met_at[each] = link
    return peers


@contextlib.contextmanager
def _listening(
    shares_memory: bool, over_tcp: bool
) -> Iterator[tuple[list[socket.socket], Address]]:
    servers = [listen()] if over_tcp else []
    host, port = servers[0].getsockname()[:2] if over_tcp else ("", 0)
    unix = None
    try:
        if shares_memory and hasattr(os, "memfd_create"):
            unix = f"pibroch-lag-{secrets.token_hex(8)}"
            servers.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            servers[-1].bind(f"\0{unix}")
            servers[-1].listen(512)
        yield servers, Address(this_machine(), unix, host, port)
    finally:
        for each in servers:
            each.close()


def _share_memory(one: Address, other: Address) -> bool:
    """Whether the two can, and want to."""
    return one.unix is not None and other.is_reached_locally(one.machine)


def _call(
    other: int,
    member: Address,
    here: Address,
    rank: int,
    key: bytes,
    stream: int,
    deadline: float,
) -> socket.socket:
    remaining = max(0.01, deadline - time.monotonic())
    if _share_memory(here, member):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(remaining)
        link.connect(f"\0{member.unix}")
    else:
        link = socket.create_connection((member.host, member.port), remaining)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        if not is_own_user(link):
            raise AuthenticationError(
                f"another user's process in place of rank {other}",
                "the ranks of one user",
                "end what listens there",
            )
        introduce(link, key, rank, other, stream)
    except BaseException:
        link.close()
        raise
    link.settimeout(None)
    return link
