"""MPI in processes that no ``mpiexec`` has started.

A thread of each answers what MPI asks its process manager (PMI 1).

MPI wants to know its rank, the number of ranks, and where the others listen; torch's store knows
all that. Under ``mpiexec`` nothing of this happens, but ranks must be numbered as in torch. MPI is
never finalized, as that would wait for ranks that are lost.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol

from pibroch.errors import ConfigError, MissingDependencyError, TrainingError

LARGEST = {"kvsname_max": 256, "keylen_max": 64, "vallen_max": 1024}
NAME = "pibroch"
_LAUNCHED = ("PMI_RANK", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


class SharedStore(Protocol):
    """What is used of torch's stores; ``get`` waits."""

    def set(self, key: str, value: str, /) -> None: ...  # noqa: D102
    def get(self, key: str, /) -> bytes: ...  # noqa: D102
    def check(self, keys: list[str], /) -> bool: ...  # noqa: D102
    def add(self, key: str, amount: int, /) -> int: ...  # noqa: D102


def start_mpi(store: SharedStore, rank: int, num_ranks: int) -> ModuleType:
    """``mpi4py.MPI``, started between all ranks of the run, if it is not yet.

    Blocks; all ranks call it.

    Args:
        store: between all ranks, of this purpose alone.
        rank: in the run.
        num_ranks: of the run.

    Raises:
        MissingDependencyError: without mpi4py and an MPI library.
        ConfigError: when ``mpiexec`` numbers ranks otherwise.
        TrainingError: when MPI does not start.
    """
    module = load_mpi()
    if not module.Is_initialized():
        if not any(name in os.environ for name in _LAUNCHED):
            _speak_pmi(store, rank, num_ranks)
        given = ctypes.c_int()
        # not by mpi4py, which would hold the interpreter's lock while another thread has to answer
        code = ctypes.CDLL(module.__file__).MPI_Init_thread(
            None, None, int(module.THREAD_MULTIPLE), ctypes.byref(given)
        )
        if code != 0 or given.value != int(module.THREAD_MULTIPLE):
            raise TrainingError(
                f"MPI that does not start (code {code}, threads {given.value})",
                "an MPI that lets any thread call",
                "install the extra mpi, which brings MPICH",
            )
        module.COMM_WORLD.Barrier()
        forget_files()
    world = module.COMM_WORLD
    if (world.rank, world.size) != (rank, num_ranks):
        raise ConfigError(
            f"rank {rank} of {num_ranks}, which is {world.rank} of {world.size} to MPI",
            "the same numbers",
            "start ranks without mpiexec, or set RANK and WORLD_SIZE to what it says",
        )
    return module


def load_mpi() -> ModuleType:
    """``mpi4py.MPI``, which neither starts MPI nor ends it.

    Raises:
        MissingDependencyError: without it, or the library below it.
    """
    try:
        package = import_module("mpi4py")
        if "mpi4py.MPI" not in sys.modules:
            package.rc.initialize = package.rc.finalize = False
        return import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise MissingDependencyError(
            f"the transport mpi without MPI ({str(error).splitlines()[0]})",
            "the extra `mpi`",
            "pip install 'pibroch[mpi]'",
        ) from error


def forget_files() -> None:
    """Take the names of MPI's shared memory out of ``/dev/shm``, once all have it.

    A rank that is killed cannot.
    """
    for name in _mapped_files():
        with suppress(OSError):
            os.unlink(name)


def _mapped_files() -> Iterable[str]:
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        return {
            line.split(maxsplit=5)[5]
            for line in lines
            if "/dev/shm/mpich" in line and "(deleted)" not in line
        }
    return ()


def _speak_pmi(store: SharedStore, rank: int, num_ranks: int) -> None:
    """Give MPI a socket at whose other end a thread answers."""
    own_end, mpi_end = socket.socketpair()
    os.environ |= {
        "PMI_FD": str(mpi_end.detach()),
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(num_ranks),
    }
    threading.Thread(
        target=_answer, args=(own_end, store, num_ranks), name="pmi", daemon=True
    ).start()


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
