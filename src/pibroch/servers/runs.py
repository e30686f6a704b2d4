"""What a server keeps for trainers, by key: all of one run, at whose end it goes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from pibroch.errors import ConfigError, TrainingError
from pibroch.rpc.info import WorkerInfo


class Served(Protocol):
    """Something that trainers wait for."""

    def fail(self, error: Exception) -> None:
        """Fail what waits, and whoever comes later."""


S = TypeVar("S", bound=Served)


class Runs(Generic[S]):
    """One run after the other. Threads may call it at once.

    Args:
        role: of this process, in messages.
        what: trainers have to agree on.
    """

    def __init__(self, role: str, what: str) -> None:
        self._role = role
        self._what = what
        self._lock = threading.Lock()
        self._run = ""
        self._kept: dict[str, tuple[S, Sequence[object]]] = {}
        self._trainers: set[tuple[str, int]] = set()

    def configure(
        self,
        run: str,
        trainer: Sequence[str | int],
        key: str,
        wanted: Sequence[object],
        forgotten: Sequence[str],
        make: Callable[[], S],
    ) -> None:
        """Make what is wanted, or make sure that what has this key is what is wanted.

        Args:
            run: whose trainers these are; what is kept for another run goes.
            trainer: name of the caller, and its incarnation: another one may come under the same
                name.
            key: of what is wanted.
            wanted: the same from every trainer.
            forgotten: keys of this run that are not needed any more.
            make: makes it.

        Raises:
            ConfigError: for what cannot be, or is not what another trainer wanted.
        """
        name, incarnation = trainer
        with self._lock:
            if run != self._run:
                self._end_run()
            self._run = run
            self._trainers.add((str(name), int(incarnation)))
            for old in forgotten:
                self._kept.pop(old, None)
            if key not in self._kept:
                self._kept[key] = make(), wanted
            elif self._kept[key][1] != wanted:
                raise ConfigError(
                    f"other {self._what} from {name} than from another trainer",
                    "the same program on all trainers",
                )

    def find(self, key: str) -> S:
        """What has this key.

        Raises:
            TrainingError: when nothing has.
        """
        entry = self._kept.get(key)
        if entry is None:
            raise TrainingError(
                f"{self._role} that holds nothing of this run: it was started anew, or serves"
                " another run",
                "the one that the run began with",
                "a training run goes on with --resume",
            )
        return entry[0]

    def on_lost(self, worker: WorkerInfo, incarnation: int) -> None:
        """A worker is gone: if it was a trainer, rounds that wait for it never end.

        With the last one its run ends.
        """
        with self._lock:
            if (worker.name, incarnation) not in self._trainers:
                return
            self._trainers.remove((worker.name, incarnation))
            for kept, _ in self._kept.values():
                kept.fail(
                    TrainingError(
                        f"the end of {worker.name} while others go on",
                        "all trainers",
                        "see its log",
                    )
                )
            if not self._trainers:
                self._end_run()

    def _end_run(self) -> None:
        ended = list(self._kept.values())
        self._kept = {}
        self._trainers.clear()
        for kept, _ in ended:
            kept.fail(
                TrainingError(
                    f"{self._role} where this run has given way to another", "one of its own"
                )
            )
