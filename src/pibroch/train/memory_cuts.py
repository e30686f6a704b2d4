"""Cuts in memory: what a run goes on from when processes of it were lost and the machine was not.

Every few steps all ranks, and embedding servers, keep their rows as they are, and rank 0 keeps the
dense layers, in memory that the launcher holds (:mod:`pibroch.forkserver`). Processes that are
started again find it there: nothing is read from a disk, and the steps since the cut are trained
again. ``docs/design/0025-cuts-in-memory.md`` explains.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from safetensors.torch import load, save

from pibroch.collectives.agreement import on_first, together
from pibroch.embedding import Shard
from pibroch.exchange.base import CachesRows
from pibroch.forkserver import Link, link_to_server
from pibroch.kernels.arrays import Bytes
from pibroch.observability.memory import free_memory
from pibroch.observability.trace import span
from pibroch.state.dense import (
    DenseState,
    gather_session,
    load_dense_optimizer,
    load_dense_weights,
    load_row_indices,
    load_windows,
)
from pibroch.state.kept_rows import (
    HEAD_BYTES,
    STEPS,
    KeepsItself,
    KeptShard,
    keep,
    newest_common,
    steps_in,
)
from pibroch.state.manifest import Progress
from pibroch.train.pace import Pace

if TYPE_CHECKING:
    from pibroch.train.session import Session

logger = logging.getLogger(__name__)
SHARE = 0.015
"""Share of the training thread's time that cuts may take, where no interval is given."""
SHORTEST_S = 0.5
FIRST_S = 2.0
LONGEST_S = 30.0
_LATEST = 5
_GROWTH = 1.3
"""Cuts, by whose median the time between two is chosen, and how much longer it may become at once.

The first ones touch memory that nobody has touched before, and would make the next ones rare, and
so larger.
"""
STATE = "state"
_LENGTHS = slice(8, 10)
_ROOM_BYTES = 1 << 20
_ROOM_FACTOR = 4
"""Memory reserved for rank 0's part of a cut, which grows after the first cut.

``_ROOM_BYTES`` for plain values, a few hundred bytes of progress; ``_ROOM_FACTOR`` times the
weights for these and for up to three numbers of an optimizer's for each, which has none before its
first step. Pages that are never written take no memory.
"""
_LENGTH = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class CutState:
    """What rank 0 keeps of a step besides rows.

    Attributes:
        progress: where the run is.
        base_step: of the checkpoint since which rows are marked for the next one beside training;
            ``None`` for the seed.
        dense: tensors.
    """

    progress: Progress
    base_step: int | None
    dense: DenseState

    def encode(self) -> bytes:
        """As one string of bytes."""
        named = {
            f"{file}:{name}": each
            for file, tensors in self.dense.items()
            for name, each in tensors.items()
        }
        about = {
            "progress": self.progress.model_dump(mode="json"),
            "base_step": self.base_step,
            "files": list(self.dense),
            "names": list(named),
        }
        text = json.dumps(about).encode()
        return (
            _LENGTH.pack(len(text))
            + text
            + save({name: each.detach().cpu().clone() for name, each in named.items()})
        )

    @classmethod
    def decode(cls, content: bytes) -> CutState:
        """The inverse."""
        end = _LENGTH.size + _LENGTH.unpack_from(content)[0]
        about = json.loads(content[_LENGTH.size : end])
        # an optimizer has nothing before its first step
        dense: DenseState = {file: {} for file in about["files"]}
        tensors = load(content[end:])  # in any order
        for key in about["names"]:
            file, _, name = key.partition(":")
            dense[file][name] = tensors[key]
        return cls(Progress.model_validate(about["progress"]), about["base_step"], dense)


def has_state() -> bool:
    """Whether an earlier process of the run has kept something."""
    link = link_to_server()
    return link is not None and link.kept(STATE) is not None


class _StateMemory:
    """Two places for states, of which the older one is written to."""

    def __init__(self, memory: Bytes) -> None:
        self._head = memory[:HEAD_BYTES].view(np.int64)
        self._room = (len(memory) - HEAD_BYTES) // 2
        self._slots = memory[HEAD_BYTES:][: 2 * self._room].reshape(2, self._room)

    @staticmethod
    def num_bytes(content: int) -> int:
        """Of memory for two states, which take so many bytes before the first step."""
        return HEAD_BYTES + 2 * (_ROOM_FACTOR * content + _ROOM_BYTES)

    def steps(self) -> set[int]:
        return steps_in(self._head.view(np.uint8))

    def forget(self) -> None:
        self._head[:] = 0

    def fits(self, content: bytes) -> bool:
        return len(content) <= self._room

    def write(self, step: int, content: bytes) -> None:
        steps = self._head[STEPS]
        slot = int(np.argmin(steps))
        steps[slot] = 0
        self._slots[slot, : len(content)] = np.frombuffer(content, np.uint8)
        self._head[_LENGTHS][slot] = len(content)
        steps[slot] = step + 1

    def read(self, step: int) -> bytes:
        (slot,) = np.flatnonzero(self._head[STEPS] == step + 1)[:1]
        return self._slots[slot, : self._head[_LENGTHS][slot]].tobytes()


class MemoryCuts:
    """Every few steps one, on all ranks at once; where no memory outlives processes, none.

    Attributes:
        count: made so far by this process.
        seconds_taken: from the thread that trains.
    """

    def __init__(self, session: Session) -> None:
        self.count = 0
        self.seconds_taken = 0.0
        self._session = session
        self._control = session.world.control
        given = session.config.train.cut_every_seconds
        self._pace = Pace(self._control, FIRST_S if given is None else given)
        self._is_paced = given is None
        self._is_unsettled = False
        self._has_begun = False
        self._took = deque[float](maxlen=_LATEST)
        self._link = link_to_server() if given != 0 else None
        self._shards = self._now()
        about = session.config.model_dump_json() + session.dataset.digest
        self._tag = hashlib.sha256(about.encode()).hexdigest()[:16]
        self._kept: list[KeptShard] | None = self._open(self._link)
        self._state: _StateMemory | None = None

    def _now(self) -> list[object]:
        return list(self._session.embeddings.exchange.shards)

    def _open(self, link: Link | None) -> list[KeptShard] | None:
        """What is kept of this rank's shards.

        ``None`` on all ranks where there is no memory for it on some.
        """
        exchange = self._session.embeddings.exchange
        rank = self._control.ranks.rank
        shards = exchange.shards
        caches = exchange.caches if isinstance(exchange, CachesRows) else ()
        if not all(self._control.gather(link is not None)):
            return None
        assert link is not None, "on all ranks"
        needed = sum(self._control.gather(sum(shard.num_bytes for shard in shards)))
        is_there = on_first(self._control, lambda: link.kept(STATE) is not None)
        if not is_there and on_first(self._control, lambda: needed > free_memory() // 2):
            logger.info(
                "rows are not kept in memory for a restart: they would take %.1f GB more",
                needed / 1e9,
            )
            return None
        size = self._control.ranks.world_size
        cuts = [
            kept
            for number, shard in enumerate(chain[Shard | KeepsItself](shards, caches))
            if (kept := keep(shard, f"rank {rank} of {size} rows {number}", self._tag)) is not None
        ]
        return cuts if all(self._control.gather(len(cuts) == len(shards) + len(caches))) else None

    def newest(self, saved_step: int) -> int | None:
        """The step of the newest cut from which all can go on.

        ``None`` where there is none, or a newer checkpoint.

        Args:
            saved_step: of the newest checkpoint.
        """
        if self._kept is None or self._link is None:
            return None
        memory = self._link.kept(STATE)
        if memory is not None and memory.tag == self._tag:
            self._state = _StateMemory(np.frombuffer(memory.memory, np.uint8))
        own = [kept.steps() for kept in self._kept] + [
            set() if self._state is None else self._state.steps()
        ]
        cuts = self._control.gather([sorted(steps) for steps in own])
        step = newest_common(set(steps) for rank in cuts for steps in rank)
        return None if step is None or step < saved_step else step

    def state_of(self, step: int) -> CutState:
        """What was kept besides rows."""
        assert self._state is not None, "see newest"
        return CutState.decode(self._state.read(step))

    def restore(self, step: int, state: CutState) -> None:
        """Bring the session to where it was.

        Every rank calls it, once rows are marked for checkpoints.
        """
        assert self._kept is not None, "see newest"
        kept = self._kept

        def load() -> None:
            for each in kept:
                each.restore(step)
                each.go_on()
            self._session.has_rows = True
            self._session.embeddings.step = step
            load_row_indices(state.dense.__getitem__, self._session.embeddings)
            load_dense_weights(state.dense.__getitem__, self._session)
            load_dense_optimizer(state.dense.__getitem__, self._session)
            load_windows(state.dense.__getitem__, state.dense, self._session)

        together(self._control, load)
        exchange = self._session.embeddings.exchange
        if isinstance(exchange, CachesRows):
            exchange.bring_home()
        exchange.forget()
        if self._control.ranks.rank:
            self._state = None  # rank 0 alone writes it
        self._has_begun = False

    def begin(self, progress: Progress, base_step: int | None) -> None:
        """Keep everything as it is. Takes as long as a copy of all rows; every rank calls it."""
        if self._kept is None or self._link is None:
            return
        self._session.embeddings.exchange.flush()
        content = self._content(progress, base_step)
        # rank 0 alone writes it, also where newest has found one that is older than a checkpoint
        self._state = None
        if self._control.ranks.rank == 0:
            memory = self._link.keep(STATE, self._tag, _StateMemory.num_bytes(len(content))).memory
            self._state = _StateMemory(np.frombuffer(memory, np.uint8))
            self._state.forget()
            self._state.write(progress.step, content)
        for kept in self._kept:
            kept.begin(progress.step)
        self._has_begun = False

    def after_step(
        self,
        step: int,
        progress: Callable[[], Progress],
        base_step: int | None,
        is_wanted: bool = False,
    ) -> None:
        """Make one of this step, if it is due or wanted; every rank calls it after each step."""
        if not self._has_begun:  # a first step takes longer than any other
            self._has_begun = True
            self._pace.restart()
        if self._kept is None or not (is_wanted or self._is_due(step, self._kept)):
            return
        start = time.perf_counter()
        with span("cut in memory"):
            self._cut(self._kept, progress(), base_step)
        taken = time.perf_counter() - start
        self.count = self.count + 1
        self.seconds_taken = self.seconds_taken + taken
        self._took.append(taken)
        if self._is_paced:
            most = min(LONGEST_S, _GROWTH * self._pace.interval_s)
            self._pace.interval_s = max(
                SHORTEST_S, min(most, statistics.median(self._took) / SHARE)
            )
        self._pace.restart()

    def _is_due(self, step: int, kept: Sequence[KeptShard]) -> bool:
        before = self._pace.num_agreed
        is_due = self._pace.is_due(step)
        if self._pace.num_agreed > before:  # so all have finished the last cut
            for each in kept if self._is_unsettled else ():
                each.settle()
            self._is_unsettled = False
        return is_due

    def _cut(self, kept: Sequence[KeptShard], progress: Progress, base_step: int | None) -> None:
        exchange = self._session.embeddings.exchange
        if isinstance(exchange, CachesRows):
            exchange.finish_updates()
        else:
            exchange.flush()
        content = self._content(progress, base_step)
        has_moved = self._now() != self._shards
        fits = self._state is None or self._state.fits(content)
        # this also says that all have finished the last one
        if not all(self._control.gather(fits and not has_moved)):
            why = "rows have moved, or the model has grown"
            logger.info("from now on nothing is kept in memory for a restart: %s", why)
            if self._state is not None:
                self._state.forget()
            self._kept = None
            return
        if self._state is not None:
            self._state.write(progress.step, content)
        for each in kept:
            each.cut(progress.step)
        self._is_unsettled = True

    def _content(self, progress: Progress, base_step: int | None) -> bytes:
        dense = gather_session(self._session, self._control)
        return (
            CutState(progress, base_step, dense).encode() if self._control.ranks.rank == 0 else b""
        )
