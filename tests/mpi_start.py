"""MPI for ranks that no mpiexec started."""

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store


def start_mpi(ranks):
    """What mpiexec does for a program."""
    from benchmarks.workers.pmi import start_without_mpiexec

    store = PrefixStore("tests/pmi", _get_default_store())
    start_without_mpiexec(store, ranks.rank, ranks.world_size)
