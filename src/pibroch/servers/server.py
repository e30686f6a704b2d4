"""What trainers call on a server. Each function is called by name through :mod:`pibroch.rpc`."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from pibroch.errors import TrainingError
from pibroch.rpc import functions
from pibroch.servers.holdings import Holdings
from pibroch.servers.home import Exchange, Home, Sums, check_rows
from pibroch.servers.spec import Spec

log = logging.getLogger(__name__)


HOMES: Holdings[Home] = Holdings("an embedding server", "tables, optimizer or seed")


def configure(run: str, trainer: list[Any], key: str, wanted: list[Any], forgotten: list[str]) -> None:
    """Make the home ``key``, see :class:`Holdings`; ``wanted`` are the spec's fields, dim, number of trainers."""

    def make() -> Home:
        spec, dim, num_trainers = wanted
        shard, optimizer = Spec(*spec).build(dim)
        log.info("%s rows of %d tables for %s", f"{len(shard.records):,}", len(spec[0]), trainer[0])
        return Home(shard, optimizer, num_trainers)

    HOMES.configure(run, trainer, key, wanted, forgotten, make)


@functions.async_execution
def exchange(
    key: str, trainer: int, number: int, home: Tensor, records: Tensor, whole: Tensor, lent: Tensor,
    averaged_at: int | None,
) -> Future[Tensor]:  # fmt: skip
    """A trainer's part of a round of records, see :class:`Exchange`."""
    errand = Exchange(_rows(home), records.numpy(), _rows(whole), _rows(lent), averaged_at)
    return HOMES.find(key).visit(trainer, number, errand)


@functions.async_execution
def update(
    key: str, trainer: int, number: int, rows: Tensor, gradients: Tensor, learning_rate: float, step: int
) -> Future[Tensor]:
    """A trainer's part of a round of gradients, see :class:`Sums`."""
    return HOMES.find(key).visit(trainer, number, Sums(_rows(rows), gradients.numpy(), learning_rate, step))


def read(key: str, rows: slice, columns: slice) -> Tensor:
    """Columns of rows, outside of rounds: between steps, when all are done."""
    return torch.from_numpy(HOMES.find(key).shard.records[rows, columns].copy())


def write(key: str, rows: slice | Tensor, columns: slice, values: Tensor) -> None:
    """Write columns of rows, likewise."""
    records = HOMES.find(key).shard.records
    records[_checked(rows, len(records)), columns] = values.numpy()


def track_touched(key: str) -> None:
    """Mark updated rows from now on."""
    HOMES.find(key).shard.track_touched()


def read_touched(key: str, rows: slice) -> Tensor:
    """Whether rows were touched, bool."""
    return torch.from_numpy(_touched(key)[rows].copy())


def write_touched(key: str, rows: slice | Tensor, is_touched: bool) -> None:
    """Say whether rows were touched."""
    touched = _touched(key)
    touched[_checked(rows, len(touched))] = is_touched


def _touched(key: str) -> Any:
    touched = HOMES.find(key).shard.touched
    if touched is None:
        raise TrainingError("touched rows wanted of a server that does not track them", "track_touched before")
    return touched


def _rows(rows: Tensor) -> Any:
    return rows.to(torch.int64).numpy()


def _checked(rows: slice | Tensor, num_rows: int) -> Any:
    if isinstance(rows, slice):
        return rows
    numbers = _rows(rows)
    check_rows(numbers, num_rows)
    return numbers
