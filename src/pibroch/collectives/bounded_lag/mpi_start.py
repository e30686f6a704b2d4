"""MPI in processes that ``mpiexec`` has started, numbered as in torch.

It is never finalized, as that would wait for ranks that are lost.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

from pibroch.errors import ConfigError, MissingDependencyError, TrainingError

_LAUNCHED = ("PMI_RANK", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


def start_mpi(rank: int, num_ranks: int) -> ModuleType:
    """``mpi4py.MPI``, started between all ranks of the run, if it is not yet.

    Blocks; all ranks call it.

    Args:
        rank: in the run.
        num_ranks: of the run.

    Raises:
        MissingDependencyError: without mpi4py and an MPI library.
        ConfigError: without ``mpiexec``, or when it numbers ranks otherwise.
        TrainingError: when MPI does not let any thread call.
    """
    module = load_mpi()
    if not module.Is_initialized():
        if not any(name in os.environ for name in _LAUNCHED):
            raise ConfigError(
                "the transport mpi in a process that mpiexec did not start",
                "one that it has started",
                "mpiexec -n 2 python ..., with RANK and WORLD_SIZE from PMI_RANK and PMI_SIZE",
            )
        if module.Init_thread(module.THREAD_MULTIPLE) != module.THREAD_MULTIPLE:
            raise TrainingError(
                "an MPI that one thread alone may call",
                "one that lets any thread call",
                "install the extra mpi, which brings MPICH",
            )
        module.COMM_WORLD.Barrier()
        forget_files()
    world = module.COMM_WORLD
    if (world.rank, world.size) != (rank, num_ranks):
        raise ConfigError(
            f"rank {rank} of {num_ranks}, which is {world.rank} of {world.size} to MPI",
            "the same numbers",
            "set RANK and WORLD_SIZE to what mpiexec says",
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
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            if "/dev/shm/mpich" in line and "(deleted)" not in line:
                # a file has several lines, and ranks of a host the same files
                Path(line.split(maxsplit=5)[5]).unlink(missing_ok=True)
