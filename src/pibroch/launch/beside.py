"""Processes of roles that a program starts itself, on this machine, and that end with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pibroch.errors import TrainingError
from pibroch.launch.job import Job, Place
from pibroch.launch.life import Life
from pibroch.launch.roles import groups_of
from pibroch.roles.role import Role
from pibroch.stores import tcp_store

_LOOK_S = 0.1


@contextmanager
def started(
    counts: Mapping[Role, int],
    folder: Path,
    threads: int,
    rendezvous: str | None = None,
    on_restart: Callable[[str], None] = lambda reason: None,
) -> Iterator[str]:
    """Within, these run on this machine; gives their rendezvous.

    They end with this process, however it ends. Who joins them waits until they are ready; one that
    ends before its time, and may not be started again alone, is an error there.

    Args:
        counts: how many of each role.
        folder: in which each role has a folder for what its processes say.
        threads: of each one's kernels.
        rendezvous: a rendezvous that there is already; one is opened in this process when absent.
        on_restart: is told, on a thread of its own, of those that are started again.
    """
    store = None
    if rendezvous is None:
        store = tcp_store("127.0.0.1", 0, is_host=True)  # here, so that it outlives all of them
        rendezvous = f"tcp://{store.host}:{store.port}"
    job = Job(groups_of(counts, threads), str(folder))
    with Life(job, Place("", 0, rendezvous), on_restart=on_restart) as life:
        watch = _Watch(life, rendezvous, {role.command: role for role in counts})
        try:
            yield rendezvous
        finally:
            watch.stop()
            life.end()
            watch.end()
    del store


class _Watch:
    """A thread that has started again what has ended, or says so.

    What it started ends with it: it stays to the end.
    """

    def __init__(self, life: Life, rendezvous: str, roles: Mapping[str, Role]) -> None:
        self._life = life
        self._rendezvous = rendezvous
        self._roles = roles
        self._stopped = threading.Event()
        self._ended = threading.Event()
        self._looking = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="pibroch-roles", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Start nothing from now on."""
        with self._looking:
            self._stopped.set()

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            with self._looking:
                if not self._stopped.is_set():
                    self._look()
        self._ended.wait()

    def _look(self) -> None:
        from pibroch.roles.group import say_lost  # with all of RPC

        death = self._life.look()
        if death is not None:
            role = self._roles[death.group.role]
            with suppress(TrainingError, RuntimeError):  # the rendezvous ends with the run
                say_lost(self._rendezvous, role, death.number, f"ended with {death.how}")
