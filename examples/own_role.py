"""A role of one's own: processes that count which ids are read, for all trainers.

See docs/extending/role.md.

python examples/own_role.py
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from pibroch import rpc
from pibroch.launch.beside import started
from pibroch.roles import Role, group, register_role

_seen: Counter[int] = Counter()


def count(ids: Tensor) -> int:
    """Runs on the counter: add what a trainer read; returns how many reads there were in all."""
    _seen.update(ids.tolist())
    return _seen.total()


def most_read(number: int) -> list[tuple[int, int]]:
    """Runs on the counter: the ids that were read most, with their reads."""
    return _seen.most_common(number)


ROLE = Role(
    title="read counter",
    worker="counter",
    command="read-counter",
    functions="own_role",
    block=7,
    folder="counters",
    first=None,
    help="""Count which ids trainers read.

    A counter keeps its counts until it is stopped; trainers call its `own_role.count` and
    `own_role.most_read`.
    """,
)


def main() -> None:
    """Start two of them, be a trainer that tells them what it reads, and ask."""
    register_role(ROLE)
    with started({ROLE: 2}, Path("runs"), threads=1) as rendezvous:
        counters = group.join(rendezvous, {ROLE: 2}, rank=0)[ROLE]
        for step in range(10):
            ids = torch.arange(100) % (step + 1)
            parts = [ids[ids % 2 == number] for number in range(2)]
            calls = [
                rpc.rpc_async(name, count, args=(part,))
                for name, part in zip(counters, parts, strict=True)
            ]
            totals = [call.wait() for call in calls]
        print(
            f"{sum(totals)} reads; the even ids that were read most:"
            f" {rpc.rpc_sync(counters[0], most_read, args=(2,))}"
        )
        group.leave()


if __name__ == "__main__":
    # by this name the counters know the functions above, and not as those of __main__
    import own_role

    own_role.main()
