"""How much the tasks of a step are about, and what they hold, read off what they are given.

Tasks of the exchanges of pibroch; of others bytes and time alone are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from pibroch.collectives import Channel, Ranks
from pibroch.data import JaggedBatch
from pibroch.exchange.alltoall.lane import Lane, Route
from pibroch.exchange.base import Exchange
from pibroch.exchange.lookahead.announcement import Announcement
from pibroch.exchange.lookahead.oracle import JointOracle
from pibroch.exchange.schedule import Task
from pibroch.exchange.towers.peer_lookup import PeerIds
from pibroch.sim.held import held_by_kind, held_bytes
from pibroch.sim.operation import Part

OF_BATCH = ("route", "fetch", "update", "prepare", "peer ids")
"""Tasks whose work begins with each id of a rank's batch."""
OF_SLOTS = ("tower route", "tower fetch", "tower update")
"""With each id of the batches that a rank serves."""
KINDS = {
    JaggedBatch: "batches",
    Route: "batches",
    PeerIds: "batches",
    Announcement: "announcements",
    JointOracle: "oracle",
}
HELD_ONCE = ("fetch", "deliver", "combine", "tower fetch", "gradients")
"""Tasks whose results are messages that are held until the step's end."""
HELD_TWICE = ("pool", "lookup")
"""Whose results have gradients as well."""


class TaskSizes:
    """Of the tasks of one rank.

    Args:
        exchange: whose they are.
        width: floats of a row.
    """

    def __init__(self, exchange: Exchange[Any], width: float) -> None:
        self._exchange = exchange
        self._width = width
        self._is_known = is_known(exchange)
        self._touched: list[int] = []  # rows of each announced step, once for each rank
        self._rows = 0  # of the batch that was looked up last
        self._came: Any = None

    def begin(self, name: str, step: Any) -> None:
        """A task is about to be done: note what it is given, which it may drop."""
        task = self._task(name) if self._is_known else None
        if name in ("pool", "put") and task is not None and len(task.after) == 1:
            self._came = _result(step.tasks[task.after[0]])

    def end(self, name: str, step: Any, result: Any, parts: Sequence[Part]) -> None:
        """A task is done: write what its parts were about."""
        if name == "read":
            parts[0].about[0] = result.values.numel()
        elif self._is_known:
            self._note(name, step, result, parts)

    def _note(self, name: str, step: Any, result: Any, parts: Sequence[Part]) -> None:
        """What the parts of a task of pibroch's own exchanges were about."""
        first = parts[0].about
        if name in OF_BATCH:
            first[0] = step.batch.values.numel()
        elif name in OF_SLOTS:
            ids = _result(step.tasks["peer ids"])
            first[0] = sum(slot.values.numel() for slot in ids.slots)
            if name == "tower fetch":  # which it pools
                parts[-1].about[0] = first[0]
        elif name == "announce":
            self._touched.append(sum(len(rows) for lane in result.rows for rows in lane))
        elif name == "add":
            first[0] = self._touched[-1]
        elif name == "plan":
            first[0] = self._touched[min(step.number, len(self._touched)) - 1]
        elif name in ("pool", "combine"):
            if name == "pool":
                self._rows = sum(map(len, self._came))
            ids = step.batch.values.numel()
            row_bytes = 4 * self._width
            first[:] = [ids, self._rows, row_bytes * self._rows, 0, row_bytes * ids]
        elif name == "local":
            rows = sum(len(plan.local.places) for plan in step.plans)
            first[1:3] = [rows, 4 * self._width * rows]
        elif name in ("put", "take"):
            if name == "put":
                # what came from peers, or what modules here read
                read = self._came if isinstance(self._came[0], Tensor) else result
                self._rows = sum(part.nbytes for part in read)
            first[2] = self._rows
        if name in ("pool", "put"):
            self._came = None

    def messages_held(self, name: str, step: Any, result: Any) -> int:
        """Bytes of a task's result, and of its gradients, that stay until the end of its step."""
        if name in HELD_TWICE:
            return 2 * held_bytes(result)
        if name == "combine" and result is None and self._is_known:
            return held_bytes(step.gradients)
        # where modules run, what they are given back is what owners get
        is_kept = name in HELD_ONCE or (name == "take" and self._task("gradients") is None)
        return held_bytes(_result(result)) if is_kept else 0

    def held(self, step: Any) -> dict[str, int]:
        """Bytes that a rank holds beside rows and messages, by what they are."""
        return held_by_kind([self._exchange, step], KINDS, but=(Lane, Ranks, Channel))

    def slots(self, plans: Any, rank: int) -> int | None:
        """In use after a step."""
        return sum(int(plan.used[rank]) for plan in _result(plans)) if self._is_known else None

    def _task(self, name: str) -> Task | None:
        found = [task for task in self._exchange.schedule.tasks if task.name == name]
        return found[0] if found else None


def is_known(exchange: Exchange[Any]) -> bool:
    """Whether it is one of pibroch's; tasks of others may do other things by the same names."""
    return type(exchange).__module__.startswith("pibroch.")


def _result(thing: Any) -> Any:
    return thing.result() if isinstance(thing, Future) else thing
