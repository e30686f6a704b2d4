"""Steps of very many ranks, counted at a few: each is answered as it asks.

Where rows are spread evenly, a rank gives to the others about as much as it gets from them. So one
rank trains alone, and each message is answered by one of the same counts. Bytes of each of the
others follow from means over the ranks that were looked at, which are said with their error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from torch import Tensor

from pibroch.errors import ConfigError
from pibroch.exchange.layout import lay_out
from pibroch.exchange.messages import Message, Values
from pibroch.exchange.schedule import Schedule
from pibroch.exchange.wire import RowWire
from pibroch.sim.cluster import Flow
from pibroch.sim.counting import Job, RankAccount, StepCount, of_ranks, take_steps
from pibroch.sim.operation import FEATURES, Operation, Work, tensor_of
from pibroch.sim.world import Meeting, Tensors, VirtualWorld

EXACT_RANKS = 32
"""Up to so many all are counted."""
RANKS_LOOKED_AT = 6


def count_few(job: Job, ranks_per_host: int, num_steps: int) -> tuple[list[StepCount], float]:
    """Steps of ``alltoall`` of all ranks, from those of a few.

    Args:
        job: with rows that are spread evenly over all ranks.
        ranks_per_host: of each host, which their messages do not leave.
        num_steps: that are counted.

    Returns:
        The steps, and the relative standard error of their bytes.

    Raises:
        ConfigError: for a placement that gives ranks unlike loads.
    """
    uneven = [name for name, each in job.plan.placements.items() if each.kind != "row_wise"]
    if uneven:
        raise ConfigError(
            f"table {uneven[0]!r} placed {job.plan.placements[uneven[0]].kind} on"
            f" {job.num_ranks:,} ranks",
            f"row_wise for more than {EXACT_RANKS} ranks, of which a few are looked at",
            "pass --set embedding.exchange.placement=row_wise",
        )
    size = job.num_ranks
    looked_at = np.linspace(0, size - 1, RANKS_LOOKED_AT).astype(int).tolist()
    layouts = [layout for each in job.groups for layout in lay_out(each.space, job.plan, 0)]
    accounts = []
    for rank in looked_at:
        num_rows = int(min(np.diff(layout.bounds)[rank] for layout in layouts))
        if not num_rows:
            raise ConfigError(
                f"{size:,} ranks, of which some have no row of a group of tables",
                "at least one row of each a rank",
                "lower --hosts",
            )
        account = RankAccount(rank, size, partial(_answer, num_rows))
        take_steps(job, _Alone(job, account), num_steps)
        accounts.append(account)
    done = [
        [_of_one_rank(account.steps[number].works) for account in accounts]
        for number in range(num_steps)
    ]
    held = [[account.steps[number].held for account in accounts] for number in range(num_steps)]
    steps = [
        of_all([*zip(*of_step, strict=True)], size, ranks_per_host, accounts[0].schedule)
        for of_step in zip(done, held, strict=True)
    ]
    totals = [sum(sum(each.sent) for each in of_rank) for of_ranks in done for of_rank in of_ranks]
    error = float(np.std(totals, ddof=1) / np.sqrt(len(totals)) / max(1.0, np.mean(totals)))
    return steps, error


class _Alone(VirtualWorld):
    """One rank that trains, as if the others were there."""

    def __init__(self, job: Job, account: RankAccount) -> None:
        super().__init__(job.num_ranks, job.ranks_per_host, {account.rank: account})

    def meeting(self, key: object, size: int) -> Meeting:
        """See :class:`VirtualWorld`."""
        return _Mirror(size)


class _Mirror(Meeting):
    """Where a rank meets itself: what an exchange is told while it is built."""

    def come(self, number: int, rank: int, going: Tensors, coming: Tensors) -> None:
        """Get from each rank what goes to it."""
        for given, room in zip(going, coming, strict=True):
            room.copy_(given)

    def is_over(self, number: int) -> bool:
        """All is there."""
        return True


def _answer(num_rows: int, message: Message, wire: RowWire) -> Tensor:
    """As much as a message asks for, where each shard has ``num_rows``, or a few more or fewer."""
    tensor = tensor_of(message)
    if isinstance(message, Values):  # rows that others ask for, of as many as there are here
        assert list(message.receive_counts) == list(message.send_counts)
        return tensor.clamp(max=num_rows - 1)
    return tensor


class OfOneRank:
    """An operation of one rank, which stands for all.

    Attributes:
        name: of it.
        parts: what its parts are about, see :data:`FEATURES`.
        sent: bytes to all other ranks of its messages.
    """

    def __init__(self, name: str, parts: Sequence[tuple[float, ...]], sent: list[float]) -> None:
        self.name = name
        self.parts = parts
        self.sent = sent


def _of_one_rank(works: dict[str, Work]) -> list[OfOneRank]:
    return [
        OfOneRank(
            name,
            [tuple(part.about) for part in work.parts],
            [float(sum(part.sent)) for part in work.parts[:-1]],
        )
        for name, work in works.items()
    ]


def of_all(
    of_few: Sequence[tuple[Sequence[OfOneRank], dict[str, int]]],
    size: int,
    per_host: int,
    schedule: Schedule,
) -> StepCount:
    """All ranks as the mean of those that were looked at.

    Args:
        of_few: what each of these does, in one order, and bytes that it holds by name.
        size: of all ranks.
        per_host: ranks, whose messages to each other do not leave their host.
        schedule: of their tasks.
    """
    near = (per_host - 1) / (size - 1)
    operations = []
    for alike in zip(*(done for done, _ in of_few), strict=True):
        parts = np.mean([each.parts for each in alike], axis=0)
        flows: list[Flow] = []
        for amount in np.mean([each.sent for each in alike], axis=0) if alike[0].sent else ():
            across, local = (np.full(size, amount * share) for share in (1 - near, near))
            flows.append(Flow(across, across, local, local))
        every = [np.broadcast_to(part, (size, len(FEATURES))) for part in parts]
        operations.append(Operation(alike[0].name, every, flows))
    mean = {
        name: round(float(np.mean([held[name] for _, held in of_few]))) for name in of_few[0][1]
    }
    return StepCount(schedule, operations, held=of_ranks([mean] * size, operations))
