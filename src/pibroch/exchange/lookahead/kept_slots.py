"""What is in a rank's slots after a step, in memory that outlives the process that trains it.

A cut in memory need not send cached records home: each rank keeps its own, and brings them home
when a run goes on from there. There are two places, and the older one is written to: processes make
a cut only when all have finished the one before.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pibroch.forkserver import link_to_server
from pibroch.kernels import route as routing
from pibroch.kernels.arrays import Bytes, Ints, Records
from pibroch.state.kept_rows import HEAD_BYTES, STEPS, steps_in

_LENGTHS = slice(2, 4)


class KeepsRecords(Protocol):
    """Whoever has records in slots: :class:`pibroch.exchange.lookahead.carrier.Carrier`.

    Attributes:
        returned: rows and their records, to be brought home.
    """

    returned: tuple[Ints, Records]

    @property
    def space(self) -> Records:
        """The records of all places."""

    def cached(self) -> tuple[Ints, Ints]:
        """The rows whose records are in slots, and the places of these."""


class KeptSlots:
    """A :class:`~pibroch.state.kept_rows.KeptShard` of slots.

    Args:
        slots: whose records are kept.
        memory: of :meth:`num_bytes`, all zero or what was left in it.
        width: floats of a record.
    """

    def __init__(self, slots: KeepsRecords, memory: Bytes, width: int) -> None:
        self._slots = slots
        self._head = memory[:HEAD_BYTES].view(np.int64)
        most = (len(memory) - HEAD_BYTES) // (8 + 4 * width) // 2
        rows = memory[HEAD_BYTES : HEAD_BYTES + 16 * most]
        records = memory[HEAD_BYTES + 16 * most :]
        self._rows: Ints = rows.view(np.int64).reshape(2, most)
        self._records = records[: 8 * most * width].view(np.float32).reshape(2, most, width)

    @classmethod
    def open(
        cls, slots: KeepsRecords, key: str, tag: str, most: int, width: int
    ) -> KeptSlots | None:
        """What is kept under a name, as it was left or anew; ``None`` where nobody keeps memory.

        Args:
            slots: whose records are kept.
            key: the name.
            tag: what was kept of other rows, or for another purpose, has another one, and goes.
            most: rows that can be in slots at once; what is not used takes no memory.
            width: floats of a record.
        """
        link = link_to_server()
        if link is None:
            return None
        num_bytes = HEAD_BYTES + 2 * most * (8 + 4 * width)
        memory = link.keep(key, f"{tag} {most} x {width}", num_bytes).memory
        return cls(slots, np.frombuffer(memory, np.uint8), width)

    def steps(self) -> set[int]:
        """Of which :meth:`restore` is possible."""
        return steps_in(self._head.view(np.uint8))

    def begin(self, step: int) -> None:
        """Keep what is in slots now; earlier cuts do not count any more."""
        self._head[STEPS] = 0
        self.cut(step)

    def go_on(self) -> None:
        """Nothing: changes need no marks, as each cut copies all slots in use."""

    def cut(self, step: int) -> None:
        """Keep the records in slots as they are after a step. Takes tens of nanoseconds each."""
        steps = self._head[STEPS]
        rows, places = self._slots.cached()
        place = int(np.argmin(steps))
        steps[place] = 0
        self._rows[place, : len(rows)] = rows
        routing.gather_rows(self._slots.space, places, self._records[place])
        self._head[_LENGTHS][place] = len(rows)
        steps[place] = step + 1

    def settle(self) -> None:
        """Nothing: a cut copies at once and leaves nothing to be done later."""

    def restore(self, step: int) -> None:
        """Give the carrier the records to bring home, and forget later ones."""
        steps = self._head[STEPS]
        steps[steps != step + 1] = 0
        (place,) = np.flatnonzero(steps)[:1]
        num_rows = self._head[_LENGTHS][place]
        self._slots.returned = self._rows[place, :num_rows], self._records[place, :num_rows]
