"""What trainers call on an embedding server.

Each function is called by name through :mod:`pibroch.rpc`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.futures import Future

from pibroch.embedding import MemoryShard, RowArray
from pibroch.embedding.row_set import ids_of
from pibroch.errors import ProtocolError, TrainingError
from pibroch.kernels.arrays import Ints
from pibroch.rpc import functions
from pibroch.servers.runs import Runs
from pibroch.servers.served_shard import GradientSums, RecordSwap, ServedShard, check_rows
from pibroch.servers.spec import ShardSpec
from pibroch.state.kept_rows import KeptRows

log = logging.getLogger(__name__)


KEPT_ACTIONS = ("begin", "go_on", "cut", "settle", "restore")
SHARDS: Runs[ServedShard] = Runs("an embedding server", "tables, optimizer or seed")


def configure(
    run: str,
    trainer: list[str | int],
    key: str,
    wanted: list[Any],
    forgotten: list[str],
    listed: Sequence[Tensor] = (),
) -> None:
    """Make the shard ``key``, see :class:`Runs`.

    ``wanted`` are the spec's fields, dim, number of trainers; ``listed`` the ids of rows that the
    spec does not name.
    """

    def make() -> ServedShard:
        spec, dim, num_trainers = wanted
        shard, optimizer = ShardSpec(*spec).build(dim, listed)
        log.info("%s rows of %d tables for %s", f"{len(shard.records):,}", len(spec[0]), trainer[0])
        return ServedShard(shard, optimizer, num_trainers)

    SHARDS.configure(run, trainer, key, wanted, forgotten, make)


@functions.async_execution
def exchange(
    key: str,
    trainer: int,
    number: int,
    home: Tensor,
    records: Tensor,
    whole: Tensor,
    borrowed: Tensor,
    averaged_at: int | None,
) -> Future[Tensor]:
    """A trainer's part of a round of records, see :class:`RecordSwap`."""
    swap = RecordSwap(_rows(home), records.numpy(), _rows(whole), _rows(borrowed), averaged_at)
    return SHARDS.find(key).request(trainer, number, swap)


@functions.async_execution
def update(
    key: str,
    trainer: int,
    number: int,
    rows: Tensor,
    gradients: Tensor,
    learning_rate: float,
    step: int,
) -> Future[Tensor]:
    """A trainer's part of a round of gradients, see :class:`GradientSums`."""
    sums = GradientSums(_rows(rows), gradients.numpy(), learning_rate, step)
    return SHARDS.find(key).request(trainer, number, sums)


@functions.async_execution
def read_after(key: str, number: int, rows: Tensor) -> Future[Tensor]:
    """Records of rows as they are after a round, see :meth:`ServedShard.read_after`."""
    return SHARDS.find(key).read_after(number, _rows(rows))


def read(
    key: str, field: str, rows: slice, columns: slice | None, cut: str | None = None
) -> Tensor:
    """Columns of a field of optimizer state, or of the weights by the name ``""``, as float32.

    Without columns the marks of that name, bool. Outside of rounds: between steps, when all are
    done; those of the last cut of a name at any time.
    """
    array = _array(key, field, columns, cut)
    return torch.from_numpy(np.array(array[rows] if columns is None else array[rows, columns]))


def fill(key: str, seed: int) -> None:
    """Make all records what they are before the first update."""
    SHARDS.find(key).shard.fill(seed)


def start_marks(key: str, name: str) -> None:
    """Mark updated rows under a name from now on."""
    SHARDS.find(key).shard.start_marks(name)


def mark_all(key: str, name: str) -> None:
    """As if all rows had been updated since the last cut of that name."""
    _marked(key, name).mark_all(name)


def cut(key: str, name: str, with_state: bool) -> list[int] | None:
    """Keep a copy of the rows updated since the last cut of that name; how many of each piece.

    ``None`` without memory for it.
    """
    copy = _marked(key, name).cut(name, with_state)
    if copy is None:
        return None
    SHARDS.find(key).cuts[name] = copy
    return [len(piece.rows) for piece in copy.pieces]


def cut_ids(key: str, name: str, piece: int) -> Tensor:
    """Ids of the rows of a piece in the last cut of that name, int64."""
    return torch.from_numpy(ids_of(_cut(key, name).pieces[piece].rows))


def end_cut(key: str, name: str, is_saved: bool) -> None:
    """Forget the last cut of that name; if it was not saved, its rows belong to the next one."""
    served = SHARDS.find(key)
    served.cuts.pop(name, None)
    served.shard.end_cut(name, is_saved)


def keep(key: str, name: str, tag: str) -> list[int] | None:
    """Keep the rows in memory that outlives this process; of which steps they are there.

    ``None`` where there is none.
    """
    served = SHARDS.find(key)
    served.kept = KeptRows.open(served.shard, name, tag)
    return None if served.kept is None else sorted(served.kept.steps())


def kept(key: str, action: str, step: int | None = None) -> None:
    """Have :class:`KeptRows` do something of :data:`KEPT_ACTIONS`, most of it for a step."""
    kept_rows = SHARDS.find(key).kept
    if kept_rows is None:
        raise TrainingError("a cut in memory of rows that are not kept", "keep before")
    if action not in KEPT_ACTIONS:
        raise ProtocolError(f"{action!r} of kept rows", f"one of {', '.join(KEPT_ACTIONS)}")
    if action == "restore" and step not in kept_rows.steps():
        raise ProtocolError(f"rows wanted as of step {step}", "a step of which they were kept")
    getattr(kept_rows, action)(*(() if step is None else (step,)))


def write(
    key: str, field: str, rows: slice | Tensor, columns: slice | None, values: Tensor
) -> None:
    """Write columns or marks of rows, likewise."""
    array = _array(key, field, columns)
    chosen: slice | Ints = rows if isinstance(rows, slice) else _rows(rows)
    if not isinstance(chosen, slice):
        check_rows(chosen, len(array))
    array[chosen if columns is None else (chosen, columns)] = values.numpy()


def _cut(key: str, name: str) -> MemoryShard:
    cut = SHARDS.find(key).cuts.get(name)
    if cut is None:
        raise TrainingError("rows wanted of a cut that is over", "cut before")
    return cut


def _array(key: str, field: str, columns: slice | None, cut: str | None = None) -> RowArray:
    if columns is None:
        return _marked(key, field).marks.of(field)
    shard = SHARDS.find(key).shard if cut is None else _cut(key, cut)
    if field and field not in shard.fields:
        raise ProtocolError(f"{field!r} of rows", f"one of {list(shard.fields)}, or '' for weights")
    return shard.array(field)


def _marked(key: str, name: str) -> MemoryShard:
    shard = SHARDS.find(key).shard
    if name not in shard.marks:
        raise TrainingError(f"marks {name!r} of a server that has none", "start_marks before")
    return shard


def _rows(rows: Tensor) -> Ints:
    return rows.to(torch.int64).numpy()
