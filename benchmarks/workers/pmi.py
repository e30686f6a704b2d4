"""MPI among processes that joined by torch's store and no ``mpiexec`` has started.

A thread of each answers what MPI asks its process manager (PMI 1): its rank, the number of ranks,
and where the others listen. For measurements and tests, whose processes do other things too.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from typing import Protocol

from pibroch.collectives.bounded_lag.mpi_start import forget_files, load_mpi

LARGEST = {"kvsname_max": 256, "keylen_max": 64, "vallen_max": 1024}
NAME = "pibroch"


class SharedStore(Protocol):
    """What is used of torch's stores; ``get`` waits."""

    def set(self, key: str, value: str, /) -> None: ...  # noqa: D102
    def get(self, key: str, /) -> bytes: ...  # noqa: D102
    def check(self, keys: list[str], /) -> bool: ...  # noqa: D102
    def add(self, key: str, amount: int, /) -> int: ...  # noqa: D102


def start_without_mpiexec(store: SharedStore, rank: int, num_ranks: int) -> None:
    """Start MPI between all ranks, if it has not started. Blocks; all ranks call it.

    Args:
        store: between all ranks, of this purpose alone.
        rank: in the run.
        num_ranks: of the run.

    Raises:
        MissingDependencyError: without mpi4py and an MPI library.
    """
    module = load_mpi()
    if module.Is_initialized():
        return
    own_end, mpi_end = socket.socketpair()
    os.environ |= {
        "PMI_FD": str(mpi_end.detach()),
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(num_ranks),
    }
    threading.Thread(
        target=_answer, args=(own_end, store, num_ranks), name="pmi", daemon=True
    ).start()
    given = ctypes.c_int()
    # not by mpi4py, which would hold the interpreter's lock while the thread has to answer
    code = ctypes.CDLL(module.__file__).MPI_Init_thread(
        None, None, int(module.THREAD_MULTIPLE), ctypes.byref(given)
    )
    assert code == 0, code
    module.COMM_WORLD.Barrier()
    forget_files()


def _answer(link: socket.socket, store: SharedStore, num_ranks: int) -> None:
    """Lines of ``key=value`` words, the first of which is ``cmd``.

    A get of an unknown key is answered, not waited for.
    """
    with link, link.makefile("rwb", 0) as lines:
        num_barriers = 0
        for line in iter(lines.readline, b""):
            request = dict(word.split("=", 1) for word in line.decode().split() if "=" in word)
            if request["cmd"] == "barrier_in":
                num_barriers += 1
            try:
                answer = _answer_to(request, store, num_ranks, num_barriers)
            except RuntimeError:  # the store is gone, or a rank did not come
                return
            lines.write(
                (" ".join(f"{key}={value}" for key, value in answer.items()) + "\n").encode()
            )
            if request["cmd"] == "finalize":
                return


def _answer_to(
    request: dict[str, str], store: SharedStore, num_ranks: int, num_barriers: int
) -> dict[str, str | int]:
    command = request["cmd"]
    fixed: dict[str, dict[str, str | int]] = {
        "init": {"cmd": "response_to_init", "pmi_version": 1, "pmi_subversion": 1, "rc": 0},
        "get_maxes": {"cmd": "maxes", **LARGEST, "rc": 0},
        "get_appnum": {"cmd": "appnum", "appnum": 0, "rc": 0},
        "get_my_kvsname": {"cmd": "my_kvsname", "kvsname": NAME, "rc": 0},
        "get_universe_size": {"cmd": "universe_size", "size": num_ranks, "rc": 0},
        "finalize": {"cmd": "finalize_ack", "rc": 0},
    }
    if command == "put":
        store.set(f"value/{request['key']}", request["value"])
        return {"cmd": "put_result", "rc": 0, "msg": "success"}
    if command == "get":
        key = f"value/{request['key']}"
        if not store.check([key]):
            return {"cmd": "get_result", "rc": -1, "msg": "key_not_found", "value": "unknown"}
        return {"cmd": "get_result", "rc": 0, "msg": "success", "value": store.get(key).decode()}
    if command == "barrier_in":
        if store.add(f"barrier/{num_barriers}", 1) == num_ranks:
            store.set(f"done/{num_barriers}", "1")
        store.get(f"done/{num_barriers}")
        return {"cmd": "barrier_out", "rc": 0}
    return fixed.get(command, {"cmd": command, "rc": -1})
