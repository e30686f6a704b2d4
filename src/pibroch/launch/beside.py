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
    by_command = {role.command: role for role in counts}
    looking = threading.Lock()
    is_stopped = threading.Event()
    has_ended = threading.Event()

    def watch() -> None:
        from pibroch.roles.group import say_lost  # with all of RPC

        while not is_stopped.wait(_LOOK_S):
            with looking:
                death = None if is_stopped.is_set() else life.look()
            if death is not None:
                role = by_command[death.group.role]
                with suppress(TrainingError, RuntimeError):  # the rendezvous ends with the run
                    say_lost(rendezvous, role, death.number, f"ended with {death.how}")
        has_ended.wait()  # what this thread has started ends with it

    thread = threading.Thread(target=watch, name="pibroch-roles", daemon=True)
    place = Place("", 0, rendezvous)
    with Life(job, place, on_restart=lambda death: on_restart(str(death))) as life:
        thread.start()
        try:
            yield rendezvous
        finally:
            with looking:  # nothing is started from now on
                is_stopped.set()
            life.end()
            has_ended.set()
            thread.join()
    del store
