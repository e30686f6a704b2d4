"""Which transport a channel has: NCCL, gloo, or shared memory within a host and gloo between."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch.distributed as dist

from pibroch.collectives.gloo import GlooTransport
from pibroch.collectives.nccl import NcclTransport
from pibroch.collectives.transport import Group, Transport
from pibroch.errors import ConfigError

TRANSPORT_VARIABLE = "PIBROCH_CHANNEL_TRANSPORT"
CHOICES = ("auto", "gloo")
"""``auto`` is shared memory within a host; with ``gloo`` all messages of a rank go over gloo.

With gloo a training step takes 1.05 to 1.2 times as long, see design note 0022.
"""


def open_host_transport(ranks: Group) -> Transport:
    """Gloo, and shared memory between the ranks of a host that all allow it. Blocks.

    Raises:
        ConfigError: for a transport in the environment that is not known.
    """
    # imported here, as a run of one process does not need them
    from pibroch.collectives.kernels.atomics import FUTEX_CALL
    from pibroch.wire.rendezvous import rendezvous

    choice = os.environ.get(TRANSPORT_VARIABLE) or "auto"
    if choice not in CHOICES:
        raise ConfigError(
            f"{TRANSPORT_VARIABLE}={choice} in the environment", f"one of {', '.join(CHOICES)}"
        )
    network = GlooTransport(ranks)
    shares_memory = choice == "auto" and FUTEX_CALL is not None
    links = rendezvous(
        network.store,
        ranks.rank,
        ranks.world_size,
        ranks.timeout_s,
        shares_memory=shares_memory,
        streams=(),
    ).local
    if not links:
        return network
    # imported here, as systems without shared memory do not need them
    from pibroch.collectives.host_transport import HostTransport
    from pibroch.collectives.mailbox import Mailbox

    mailbox = Mailbox(links, ranks.rank, ranks.world_size, ranks.timeout_s)
    return HostTransport(network, mailbox, ranks)


TRANSPORTS: dict[str, Callable[[Group], Transport]] = {
    "gloo": GlooTransport,
    "host": open_host_transport,
    "nccl": NcclTransport,
}
"""By name; each opens one between all members of a group, which all call it. Blocks."""


def open_transport(ranks: Group) -> Transport:
    """A channel over NCCL, or over gloo and shared memory within a host.

    NCCL is used where torch.distributed's default group uses it.

    Raises:
        ConfigError: without torch.distributed's default group.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return TRANSPORTS["nccl"](ranks)
    return open_host_transport(ranks)
