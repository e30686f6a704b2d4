"""What trainers call on a server. Each function is called by name through :mod:`pibroch.rpc`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from pibroch.errors import ConfigError, TrainingError
from pibroch.rpc import functions
from pibroch.rpc.info import WorkerInfo
from pibroch.servers.home import Exchange, Home, Sums, check_rows
from pibroch.servers.spec import Spec

log = logging.getLogger(__name__)


class Server:
    """This process's homes, by key; all of one run, at whose end they go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._run = ""
        self._homes: dict[str, tuple[Home, list[Any]]] = {}
        self._trainers: set[tuple[str, int]] = set()

    def configure(
        self, run: str, trainer: tuple[str, int], key: str, wanted: list[Any], forgotten: Sequence[str]
    ) -> None:
        """Make a home, or make sure that the one of this name is what is wanted."""
        with self._lock:
            if run != self._run:
                self._end_run()
            self._run = run
            self._trainers.add(trainer)
            for old in forgotten:
                self._homes.pop(old, None)
            if key not in self._homes:
                spec, dim, num_trainers = wanted
                shard, optimizer = Spec(*spec).build(dim)
                self._homes[key] = Home(shard, optimizer, num_trainers), wanted
                log.info("%s rows of %d tables for %s", f"{len(shard.records):,}", len(spec[0]), trainer[0])
            elif self._homes[key][1] != wanted:
                raise ConfigError(
                    f"other tables, optimizer or seed from {trainer[0]} than from another trainer",
                    "the same program on all trainers",
                )

    def home(self, key: str) -> Home:
        """The home of this name."""
        found = self._homes.get(key)
        if found is None:
            raise TrainingError(
                "an embedding server that holds nothing of this run: it was started anew, or serves another run",
                "the server that the run began with",
                "a training run goes on with --resume",
            )
        return found[0]

    def on_lost(self, worker: WorkerInfo, incarnation: int) -> None:
        """A worker is gone: if it was a trainer, rounds that wait for it never end. With the last one its run ends."""
        with self._lock:
            if (worker.name, incarnation) not in self._trainers:
                return
            self._trainers.remove((worker.name, incarnation))
            for home, _ in self._homes.values():
                home.fail(TrainingError(f"the end of {worker.name} while others go on", "all trainers", "see its log"))
            if not self._trainers:
                self._end_run()

    def _end_run(self) -> None:
        homes, self._homes = list(self._homes.values()), {}
        self._trainers.clear()
        for home, _ in homes:
            home.fail(
                TrainingError("an embedding server where this run has given way to another", "servers of its own")
            )


SERVER = Server()


def configure(run: str, trainer: list[Any], key: str, wanted: list[Any], forgotten: list[str]) -> None:
    """Make the home ``key``; every trainer calls it with the same ``wanted``: the spec's fields, dim, number of trainers.

    Args:
        run: whose trainers these are; homes of another run go.
        trainer: name of the caller, and its incarnation: another one may come under the same name.
        key: name of the home.
        wanted: what it is to be.
        forgotten: homes of this run that are not needed any more.

    Raises:
        ConfigError: for what cannot be, or is not what another trainer wanted.
    """
    SERVER.configure(run, (trainer[0], trainer[1]), key, wanted, forgotten)


@functions.async_execution
def exchange(
    key: str, trainer: int, number: int, home: Tensor, records: Tensor, whole: Tensor, lent: Tensor,
    averaged_at: int | None,
) -> Future[Tensor]:  # fmt: skip
    """A trainer's part of a round of records, see :class:`Exchange`."""
    errand = Exchange(_rows(home), records.numpy(), _rows(whole), _rows(lent), averaged_at)
    return SERVER.home(key).visit(trainer, number, errand)


@functions.async_execution
def update(
    key: str, trainer: int, number: int, rows: Tensor, gradients: Tensor, learning_rate: float, step: int
) -> Future[Tensor]:
    """A trainer's part of a round of gradients, see :class:`Sums`."""
    return SERVER.home(key).visit(trainer, number, Sums(_rows(rows), gradients.numpy(), learning_rate, step))


def read(key: str, rows: slice, columns: slice) -> Tensor:
    """Columns of rows, outside of rounds: between steps, when all are done."""
    return torch.from_numpy(SERVER.home(key).shard.records[rows, columns].copy())


def write(key: str, rows: slice | Tensor, columns: slice, values: Tensor) -> None:
    """Write columns of rows, likewise."""
    records = SERVER.home(key).shard.records
    records[_checked(rows, len(records)), columns] = values.numpy()


def track_touched(key: str) -> None:
    """Mark updated rows from now on."""
    SERVER.home(key).shard.track_touched()


def read_touched(key: str, rows: slice) -> Tensor:
    """Whether rows were touched, bool."""
    return torch.from_numpy(_touched(key)[rows].copy())


def write_touched(key: str, rows: slice | Tensor, is_touched: bool) -> None:
    """Say whether rows were touched."""
    touched = _touched(key)
    touched[_checked(rows, len(touched))] = is_touched


def _touched(key: str) -> Any:
    touched = SERVER.home(key).shard.touched
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
