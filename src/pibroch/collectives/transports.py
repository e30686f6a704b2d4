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
"""``auto`` is shared memory within a host; with ``gloo`` all messages of a rank go over gloo."""
DEFAULT_CHOICE = "auto"
"""For channels: with gloo a training step takes 1.05 to 1.2 times as long, see design note 0022."""


def open_host_transport(ranks: Group, choice_when_absent: str = "auto") -> Transport:
    """Gloo, and shared memory between the ranks of a host that all allow it. Blocks.

    Args:
        ranks: the members of the group.
        choice_when_absent: one of CHOICES, where the environment has none.

    Raises:
        ConfigError: for a transport in the environment that is not known.
    """
    # imported here, as a run of one process does not need them
    from pibroch.kernels.atomics import FUTEX_CALL
    from pibroch.wire.rendezvous import rendezvous_on_host

    choice = os.environ.get(TRANSPORT_VARIABLE) or choice_when_absent
    if choice not in CHOICES:
        raise ConfigError(
            f"{TRANSPORT_VARIABLE}={choice} in the environment", f"one of {', '.join(CHOICES)}"
        )
    network = GlooTransport(ranks)
    shares_memory = choice == "auto" and FUTEX_CALL is not None
    links = rendezvous_on_host(
        network.store, ranks.rank, ranks.world_size, ranks.timeout_s, shares_memory=shares_memory
    )
    if not links:
        return network
    # imported here, as systems without shared memory do not need them
    from pibroch.collectives.host_transport import HostTransport
    from pibroch.collectives.mailbox import Mailbox

    mailbox = Mailbox(links, ranks.rank, ranks.world_size, ranks.timeout_s)
    return HostTransport(network, mailbox, ranks.members, ranks.rank, ranks.timeout_s)


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
    if not dist.is_initialized():
        raise ConfigError(
            f"{ranks.world_size} ranks without a process group",
            "one",
            'call torch.distributed.init_process_group("gloo") first,'
            " or use `pibroch train --ranks`",
        )
    if dist.get_backend() == "nccl":
        return TRANSPORTS["nccl"](ranks)
    return open_host_transport(ranks, DEFAULT_CHOICE)
