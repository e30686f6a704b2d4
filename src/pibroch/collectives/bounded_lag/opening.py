"""Opening a transport between the ranks of a group.

Who shares a host decides what carries which messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import sha256
from types import ModuleType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch does not export it by name
from torch.distributed.distributed_c10d import _get_default_store

from pibroch.collectives.bounded_lag.base import LaggedTransport
from pibroch.collectives.bounded_lag.gloo_streams import GlooStreamTransport
from pibroch.collectives.bounded_lag.mixed import MixedTransport
from pibroch.collectives.bounded_lag.mpi import MpiTransport
from pibroch.collectives.bounded_lag.mpi_start import load_mpi, start_mpi
from pibroch.collectives.bounded_lag.options import BoundedLagOptions
from pibroch.collectives.bounded_lag.rendezvous import rendezvous
from pibroch.collectives.bounded_lag.shared_memory import SharedMemoryTransport
from pibroch.collectives.bounded_lag.tcp import TcpTransport
from pibroch.collectives.ranks import Ranks
from pibroch.errors import ConfigError
from pibroch.kernels.atomics import FUTEX_CALL

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch does not export it by name


def open_lagged_transport(
    store: Store,
    rank: int,
    members: Sequence[int],
    num_slots: int,
    options: BoundedLagOptions,
    timeout_s: float,
    num_streams: int = 1,
) -> LaggedTransport:
    """A transport between all members, each of which calls this. Blocks.

    Args:
        store: of this transport alone.
        rank: of this process in the group.
        members: the group's ranks, at least two, by their numbers in the run.
        num_slots: of each stream.
        options: of the group.
        timeout_s: for all to come, and of each wait later.
        num_streams: of messages that are numbered together.

    Raises:
        TrainingError: when some did not come.
    """
    name = options.resolved_transport()
    if name == "gloo":
        return GlooStreamTransport(store, rank, members, num_slots, timeout_s)
    if name == "mpi":
        start = _mpi_to_start(store, rank, members)
        peers = rendezvous(store, rank, len(members), timeout_s)
        return MpiTransport(
            start(), peers, rank, members, num_slots, options.slot_bytes, num_streams, timeout_s
        )
    shares_memory = FUTEX_CALL is not None and name == "auto"
    peers = rendezvous(store, rank, len(members), timeout_s, shares_memory=shares_memory)
    if not peers.local:
        return TcpTransport(peers.remote, rank, members, num_slots, timeout_s)
    local = SharedMemoryTransport(
        peers.local, rank, members, num_slots, options.slot_bytes, num_streams, timeout_s
    )
    if not peers.remote:
        return local
    return MixedTransport(
        local, TcpTransport(peers.remote, rank, members, num_slots, timeout_s, local.wake)
    )


def _mpi_to_start(store: Store, rank: int, members: Sequence[int]) -> Callable[[], ModuleType]:
    """What starts MPI between all ranks of the run once they are known to be there.

    Raises:
        MissingDependencyError: without it.
        ConfigError: for some of them while it does not run.
    """
    # the group that init_process_group is about to make is not there yet, and is of all ranks
    num_ranks = dist.get_world_size() if dist.is_initialized() else len(members)
    if not load_mpi().Is_initialized() and len(members) < num_ranks:
        raise ConfigError(
            f"a first transport mpi between {len(members)} of {num_ranks} ranks",
            "all of them: MPI starts on all at once",
            "make a group of all ranks with it first",
        )
    return lambda: start_mpi(PrefixStore("pmi", store), members[rank], num_ranks)


_OPENED: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()


def transport_of(
    ranks: Ranks, num_slots: int, options: BoundedLagOptions, num_streams: int
) -> LaggedTransport:
    """A transport between the members of a group of ranks, who open theirs in the same order.

    Blocks.

    Raises:
        ConfigError: without torch.distributed's default group.
        TrainingError: when some did not come.
    """
    store = store_between(ranks)
    return open_lagged_transport(
        store, ranks.rank, ranks.members, num_slots, options, ranks.timeout_s, num_streams
    )


def store_between(ranks: Ranks) -> Store:
    """A store for one meeting of a group's members, who ask for theirs in the same order.

    Raises:
        ConfigError: without torch.distributed's default group.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        raise ConfigError(
            f"{ranks.world_size} ranks without a process group",
            "one",
            'call torch.distributed.init_process_group("bls")',
        )
    opened = _OPENED.setdefault(world, Counter())
    opened[ranks.members] += 1
    name = f"pibroch/lag/{sha256(repr(ranks.members).encode()).hexdigest()}/{opened[ranks.members]}"
    return PrefixStore(name, _get_default_store())
