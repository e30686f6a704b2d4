"""Opening a transport between the ranks of a group.

Who shares a host decides what carries which messages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from pibroch.collectives.bounded_lag.base import LaggedTransport, Opening
from pibroch.collectives.bounded_lag.mixed import MixedTransport
from pibroch.collectives.bounded_lag.mpi import MpiTransport
from pibroch.collectives.bounded_lag.mpi_start import load_mpi, start_mpi
from pibroch.collectives.bounded_lag.options import BoundedLagOptions
from pibroch.collectives.bounded_lag.shared_memory import SharedMemoryTransport
from pibroch.collectives.bounded_lag.tcp import TcpTransport
from pibroch.collectives.group_store import store_between
from pibroch.collectives.kernels.atomics import FUTEX_CALL
from pibroch.collectives.ranks import Ranks
from pibroch.errors import ConfigError
from pibroch.wire.alive import HostWatch
from pibroch.wire.handshake_messages import IDLE
from pibroch.wire.rendezvous import rendezvous


def open_lagged_transport(opening: Opening) -> LaggedTransport:
    """A transport between all members, each of which calls this. Blocks.

    Raises:
        ConfigError: for a transport that is not known.
        TrainingError: when some did not come.
    """
    name = opening.options.resolved_transport()
    if name not in OPENERS:
        raise ConfigError(f"transport {name!r} of bounded lag", f"one of {', '.join(OPENERS)}")
    return OPENERS[name](opening)


def _open(opening: Opening, shares_memory: bool) -> LaggedTransport:
    peers = rendezvous(
        opening.store,
        opening.rank,
        len(opening.members),
        opening.timeout_s,
        shares_memory=shares_memory,
    )
    links = peers.remote[0]
    hosts = HostWatch(peers.remote[IDLE])
    if not peers.local:
        return TcpTransport(opening, links, hosts)
    local = SharedMemoryTransport(opening, peers.local)
    if not links:
        return local
    return MixedTransport(opening, local, TcpTransport(opening, links, hosts, local.wake))


def _open_mpi(opening: Opening) -> LaggedTransport:
    """One over MPI, which starts between all ranks of the run once they are known to be there.

    Raises:
        MissingDependencyError: without it.
        ConfigError: without ``mpiexec``, or for some of the ranks while it does not run.
    """
    members = opening.members
    # the group that init_process_group is about to make is not there yet, and is of all ranks
    num_ranks = dist.get_world_size() if dist.is_initialized() else len(members)
    if not load_mpi().Is_initialized() and len(members) < num_ranks:
        raise ConfigError(
            f"a first transport mpi between {len(members)} of {num_ranks} ranks",
            "all of them: MPI starts on all at once",
            "make a group of all ranks with it first",
        )
    # mpiexec ends all ranks when it loses a host
    peers = rendezvous(opening.store, opening.rank, len(members), opening.timeout_s, streams=(0,))
    return MpiTransport(opening, start_mpi(members[opening.rank], num_ranks), peers)


OPENERS: dict[str, Callable[[Opening], LaggedTransport]] = {
    "auto": partial(_open, shares_memory=FUTEX_CALL is not None),
    "stream": partial(_open, shares_memory=False),
    "mpi": _open_mpi,
}
"""What opens a transport, by name; one of one's own is a further entry on all ranks."""


def transport_of(
    ranks: Ranks, num_slots: int, options: BoundedLagOptions, num_streams: int
) -> LaggedTransport:
    """A transport between the members of a group of ranks, who open theirs in the same order.

    Blocks.

    Raises:
        ConfigError: without torch.distributed's default group.
        TrainingError: when some did not come.
    """
    store = store_between(ranks, "lag")
    return open_lagged_transport(
        Opening(store, ranks.rank, ranks.members, num_slots, options, ranks.timeout_s, num_streams)
    )
