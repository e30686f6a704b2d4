"""Batches of a stream: each step's records are decided once, by all ranks together.

A rank reads its partitions and fills its part of a batch. A step begins when some rank's part is
full, or has waited long enough; ranks whose parts are not full give what they have, be it nothing.
``docs/design/0035-streams.md`` says why.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch

from pibroch.data.batch import JaggedBatch, shares
from pibroch.data.streams.aside import SHOWN, SetAside, check_share
from pibroch.data.streams.base import BadRecord, Partition, Range, Source, StreamPosition
from pibroch.data.streams.decode import Decoded, Decoder
from pibroch.data.streams.journal import Journal
from pibroch.data.writer import EncodedRows
from pibroch.errors import DataError

logger = logging.getLogger(__name__)
_POLL_S = 0.02
_AHEAD = 4
"""Parts of steps to come that are filled while a step is trained: opening a file takes as long."""
_REMEMBERED = 1024
"""Steps of which it is known where each sample stands: more than are ever read ahead."""
Gather = Callable[[Callable[[], Any]], list[Any]]
"""Runs a function on every rank, which gives plain values; returns all, or raises on all."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How batches are made.

    Attributes:
        batch_size: samples a step, over all ranks; of each rank its share at most.
        wait_seconds: how long a record waits at most for a batch to fill.
        idle_seconds: without a record, after which the stream ends; ``None`` for never.
        most_bad_share: of all records that may be bad.
        skip: records that are set aside though they look good, ``FILE:LINE``.
    """

    batch_size: int
    wait_seconds: float = 0.5
    idle_seconds: float | None = None
    most_bad_share: float = 1e-3
    skip: tuple[str, ...] = ()


@dataclass(slots=True)
class _Part:
    """A rank's part of a batch, as it fills."""

    ranges: list[Range] = field(default_factory=list)
    rows: list[EncodedRows] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)
    since: float | None = None

    @property
    def samples(self) -> int:
        return sum(len(each.labels) for each in self.rows)

    @property
    def weight(self) -> float:
        weights = [each.sample_weights for each in self.rows]
        return float(sum(each.sum(dtype=np.float64) for each in weights if each is not None))

    def add(self, range: Range, decoded: Decoded) -> None:
        self.ranges.append(range)
        self.rows.append(decoded.rows)
        self.bad += decoded.bad
        if self.since is None:
            self.since = time.monotonic()


@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank says of its part before a step.

    Attributes:
        ranges: that are in it, plain.
        samples, bad: of them.
        weight: of the samples together.
        is_full: whether it takes no more.
        waited_s: since its first record came.
        idle_s: since the last record came.
        is_waiting: whether some partition waits for what must come.
        wants_end: whether somebody asked this rank to end.
        shown: some bad records, for a message.
    """

    ranges: list[list[Any]]
    samples: int
    bad: int
    weight: float
    is_full: bool
    waited_s: float
    idle_s: float
    is_waiting: bool
    wants_end: bool
    shown: list[str]


class Verdict(Enum):
    """What all ranks do next."""

    STEP = "a step"
    WAIT = "wait for more"
    PAUSE = "let what reads ahead go through"
    END = "end"


def decide(offers: Sequence[Offer], options: StreamOptions, has_given: bool) -> Verdict:
    """What follows from the ranks' offers, the same on all ranks.

    >>> options = StreamOptions(8, wait_seconds=1.0)
    >>> part = Offer([[1]], 3, 0, 0.0, False, 0.5, 0.0, False, False, [])
    >>> decide([part], options, False)
    <Verdict.WAIT: 'wait for more'>
    >>> decide([part, replace(part, waited_s=1.0)], options, False)
    <Verdict.STEP: 'a step'>
    """
    if any(offer.wants_end for offer in offers):
        return Verdict.END
    ends = options.idle_seconds is not None and all(
        offer.idle_s >= options.idle_seconds and not offer.is_waiting for offer in offers
    )
    if any(offer.samples for offer in offers):  # bad records alone make no step
        waited = max(offer.waited_s for offer in offers if offer.samples)
        is_due = any(offer.is_full for offer in offers) or waited >= options.wait_seconds
        return Verdict.STEP if is_due or ends else Verdict.WAIT
    if ends:
        return Verdict.END
    if has_given and all(offer.idle_s >= options.wait_seconds for offer in offers):
        return Verdict.PAUSE
    return Verdict.WAIT


class Stream:
    """A rank's batches of a stream.

    Iterating gives batches until the stream ends, or pauses: nothing has come for
    ``wait_seconds``. Then what reads ahead can hand out what it has; iterate again for the rest,
    unless ``has_ended``. All ranks iterate alike. Not safe to iterate from two threads.

    Args:
        source: where records come from.
        decoder: makes samples of them.
        options: how batches are made.
        part: ``(rank, world_size)``; of the partitions, numbers ``rank``, ``rank + world_size`` and
            so on are read here.
        gather: over all ranks; one rank when absent.
        journal: of steps, on rank 0; without one a death may change which records a step has, but
            no record is read twice or left out.
        aside: takes this rank's bad records; they are only counted when absent.

    Attributes:
        has_ended: whether nothing more is to come.

    Raises:
        DataError: (when iterating) for records that cannot be read, too many bad ones, or a source
            that is not what it was.
    """

    def __init__(
        self,
        source: Source,
        decoder: Decoder,
        options: StreamOptions,
        part: tuple[int, int] = (0, 1),
        gather: Gather | None = None,
        journal: Journal | None = None,
        aside: SetAside | None = None,
    ) -> None:
        self.has_ended = False
        self._rank, self._world_size = part
        self._source = source
        self._decoder = decoder
        self._options = options
        self._gather = gather or (lambda work: [work()])
        self._journal = journal
        self._aside = aside
        self._share = max(1, -(-options.batch_size // self._world_size))
        self._position = StreamPosition()
        self._partitions: dict[str, Partition] | None = None
        self._planned: deque[list[Range]] = deque()
        self._thread = ThreadPoolExecutor(1, "pibroch-stream")
        self._filling: Future[None] | None = None
        self._full: deque[_Part] = deque()  # of the next steps
        self._part = _Part()  # behind these; its own thread fills it
        self._offered = self._part
        self._given: deque[tuple[int, list[Range], list[BadRecord]]] = deque(maxlen=_REMEMBERED)
        self._last_record_at = time.monotonic()
        self._end = threading.Event()

    @property
    def position(self) -> StreamPosition:
        """Behind the last batch that was given out."""
        return self._position

    def state_at(self, position: StreamPosition) -> dict[str, Any]:
        """The state that goes on after the batch with this position.

        What it depends on is on the disk afterwards.
        """
        if self._journal is not None:
            self._journal.sync()
        return position.plain()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a saved state was, before the first batch; ranks may be others.

        Raises:
            CheckpointError: for a state that is none of a stream.
        """
        assert self._partitions is None, "before the first batch"
        self._position = StreamPosition.of_plain(state)

    def end(self) -> None:
        """End soon, on all ranks; may be called by any thread, or when a signal comes."""
        self._end.set()

    def close(self) -> None:
        """Let go of files, connections and the thread that reads."""
        self._thread.shutdown(wait=True)
        for partition in (self._partitions or {}).values():
            partition.close()
        self._source.close()
        if self._journal is not None:
            self._journal.close()

    def __iter__(self) -> Iterator[JaggedBatch]:
        if self._partitions is None:
            self._begin()
        has_given = False
        while (step := self._next_step(has_given)) is not None:
            part, offers = step
            yield self._batch(part, offers)
            has_given = True

    def _begin(self) -> None:
        """Bring this rank's partitions to the position, and read which steps were decided."""

        def open_all() -> tuple[str | None, list[list[list[Any]]], list[str]]:
            names = self._source.partitions
            self._refuse_unknown(self._position.places)
            own = names[self._rank :: self._world_size]
            self._partitions = {name: self._source.open(name) for name in own}
            for name, partition in self._partitions.items():
                if name in self._position.places:
                    partition.go_on_after(self._position.places[name])
            if self._journal is None:
                return None, [], list(self._options.skip)
            planned = self._journal.steps_after(self._position.step)
            last = planned[-1][0] if planned else self._position.step
            self._journal.skip(self._options.skip, last + 1)
            plain = [[each.plain() for each in ranges] for _, ranges in planned]
            return self._journal.run, plain, sorted(self._journal.skipped)

        run, planned, skipped = self._gather(open_all)[0]
        self._decoder.skip(skipped)
        self._planned.extend([Range.of_plain(each) for each in ranges] for ranges in planned)
        self._refuse_unknown({each.partition for ranges in self._planned for each in ranges})
        if self._aside is not None:
            self._aside.go_on_after(self._position.step, run, (self._rank, self._world_size))

    def _refuse_unknown(self, read: Iterable[str]) -> None:
        """Refuse a source without partitions that were read before."""
        names = self._source.partitions
        if unknown := sorted(set(read) - set(names)):
            raise DataError(
                f"a stream without the partition {unknown[0]!r}, which was read before",
                f"the partitions {', '.join(sorted(read))[:200]}",
                "go on with the partitions that the run began with",
            )

    def _next_step(self, has_given: bool) -> tuple[_Part, list[Offer]] | None:
        """This rank's part of the next step, and all offers; ``None`` for the end, or a pause."""
        while self._planned:
            planned = self._planned.popleft()
            offers = [Offer(**each) for each in self._gather(partial(self._again, planned))]
            self._set_aside()
            part = self._taken()
            if any(offer.samples for offer in offers):
                return part, offers
            self._move_on(offers)  # all of its records are skipped now
        while True:
            offers = [Offer(**each) for each in self._gather(self._offer)]
            self._check_share(offers)
            verdict = decide(offers, self._options, has_given)
            if verdict is Verdict.STEP:
                self._write_down(offers)
                return self._taken(), offers
            if verdict is not Verdict.WAIT:
                self.has_ended = verdict is Verdict.END
                if self.has_ended:
                    self._set_aside()  # records behind which none is good make no step
                    self._say_bad(offers)
                return None
            self._end.wait(_POLL_S)

    def _say_bad(self, offers: Sequence[Offer]) -> None:
        bad = self._position.bad + sum(offer.bad for offer in offers)
        if bad and self._rank == 0:
            records = self._position.records + sum(each.records for each in _ranges_of(offers))
            logger.warning(
                "%s of %s records of the stream were bad, and are set aside",
                f"{bad:,}",
                f"{records:,}",
            )

    def _again(self, ranges: Sequence[Range]) -> dict[str, Any]:
        """Fill the part with what a step was decided to have."""
        assert self._partitions is not None
        for each in ranges:
            if each.partition in self._partitions:
                records = self._partitions[each.partition].again(each)
                self._part.add(each, self._decoder.decode(records))
        return self._describe(self._part)

    def _offer(self) -> dict[str, Any]:
        """Fill the next part as far as records are there, and describe it."""
        if not self._full and self._filling is not None:
            self._filling.result()
        if not self._full:  # more may be there now
            self._filling = self._thread.submit(self._fill)
            self._filling.result()
        return self._describe(self._full[0] if self._full else self._part)

    def _fill(self) -> None:
        """Fill parts, on the thread that reads, as far as records are there."""
        while len(self._full) < _AHEAD and self._fill_once(self._part):
            self._last_record_at = time.monotonic()
            if self._part.samples >= self._share:
                full = self._part
                self._part = _Part()
                self._full.append(full)

    def _fill_once(self, part: _Part) -> bool:
        """Take records of the partition with the oldest that has some; whether one has."""
        assert self._partitions is not None
        for partition in sorted(self._partitions.values(), key=lambda each: each.order):
            records = partition.next(self._share - part.samples)
            if records is not None:
                part.add(records.range, self._decoder.decode(records))
                return True
        return False

    def _describe(self, part: _Part) -> dict[str, Any]:
        self._offered = part
        now = time.monotonic()
        partitions = (self._partitions or {}).values()
        offer = Offer(
            ranges=[each.plain() for each in part.ranges],
            samples=part.samples,
            bad=len(part.bad),
            weight=part.weight,
            is_full=part.samples >= self._share,
            waited_s=0.0 if part.since is None else now - part.since,
            idle_s=now - self._last_record_at,
            is_waiting=any(each.is_waiting for each in partitions),
            wants_end=self._end.is_set(),
            shown=[f"{each.file} line {each.line}: {each.reason}" for each in part.bad[:SHOWN]],
        )
        return asdict(offer)

    def _check_share(self, offers: Sequence[Offer]) -> None:
        bad = self._position.bad + sum(offer.bad for offer in offers)
        records = self._position.records + sum(each.records for each in _ranges_of(offers))
        shown = [text for offer in offers for text in offer.shown]
        check_share(bad, records, self._options.most_bad_share, shown)

    def _write_down(self, offers: Sequence[Offer]) -> None:
        """What a step has, and what it leaves out, before it is trained."""
        self._set_aside()
        if self._journal is not None:
            self._journal.append(self._position.step + 1, _ranges_of(offers))

    def _set_aside(self) -> None:
        if self._aside is not None:
            self._aside.add(self._position.step + 1, self._offered.bad)

    def _taken(self) -> _Part:
        """The part that was offered, behind which others fill from now on."""
        if self._full:
            self._full.popleft()
        else:
            self._part = _Part()
        if not self._planned and (self._filling is None or _succeeded(self._filling)):
            self._filling = self._thread.submit(self._fill)
        return self._offered

    def _batch(self, part: _Part, offers: Sequence[Offer]) -> JaggedBatch:
        counts = [offer.samples for offer in offers]
        self._move_on(offers)
        self._given.append((self._position.step, part.ranges, part.bad))
        rows = self._decoder.joined(part.rows)
        weights = None
        if rows.sample_weights is not None:
            weights = shares(rows.sample_weights, sum(counts), sum(each.weight for each in offers))
        groups = None if rows.groups is None else torch.from_numpy(rows.groups.view(np.int64))
        times = None if rows.event_times is None else torch.from_numpy(rows.event_times)
        return replace(
            self._decoder.batch(rows),
            position=self._position,
            first_sample=sum(counts[: self._rank]),
            sample_weights=weights,
            groups=groups,
            event_times=times,
        )

    def _move_on(self, offers: Sequence[Offer]) -> None:
        samples = sum(offer.samples for offer in offers)
        bad = sum(offer.bad for offer in offers)
        self._position = self._position.after(_ranges_of(offers), samples, bad)

    def place_of(self, step: int, sample: int) -> str | None:
        """Where a sample of this rank's part of a step stands, ``FILE:LINE``.

        ``None`` when the step was long ago.
        """
        found = [(ranges, bad) for number, ranges, bad in self._given if number == step]
        bad = {(each.file, each.line) for _, records in found for each in records}
        places = (
            (each.file, line)
            for ranges, _ in found
            for each in ranges
            for line in range(each.line + 1, each.line + each.records + 1)
        )
        good = (f"{file}:{line}" for file, line in places if (file, line) not in bad)
        return next(islice(good, sample, None), None)


def _succeeded(future: Future[None]) -> bool:
    return future.done() and future.exception() is None


def _ranges_of(offers: Sequence[Offer]) -> list[Range]:
    return [Range.of_plain(each) for offer in offers for each in offer.ranges]
