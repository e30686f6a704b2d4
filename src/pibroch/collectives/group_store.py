"""Where the members of a group meet: each time in a part of the run's store of its own."""

from __future__ import annotations

from collections import Counter
from hashlib import sha256
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist

from pibroch.collectives.transport import Group
from pibroch.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch does not export it by name

_NUM_OPENED: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


def store_between(ranks: Group, purpose: str) -> PrefixStore:
    """A store for one meeting of a group's members, who ask for those of a purpose in one order.

    Raises:
        ConfigError: without torch.distributed's default group.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        raise ConfigError(
            f"{ranks.world_size} ranks without a process group",
            "one",
            'call torch.distributed.init_process_group("gloo") first,'
            " or use `pibroch train --ranks`",
        )
    # not in every build of torch
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    opened = _NUM_OPENED.setdefault(world, Counter())
    name = f"pibroch/{purpose}/{sha256(repr(ranks.members).encode()).hexdigest()}"
    opened[name] += 1
    return PrefixStore(f"{name}/{opened[name]}", _get_default_store())
