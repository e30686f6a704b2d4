import gc
import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's threads would spin and take cores from other tests
import torch

HERE = Path(__file__).parent
ALONE = {
    "conformance/test_lagged_transport.py::test_who_waits_sleeps": "idle CPU",
    "conformance/test_lagged_transport.py::test_a_rank_that_is_lost_is_named_by_all_others": "times, looks at /dev/shm",
    "distributed/test_bls_failure.py": "times, looks at /dev/shm",
    "distributed/rpc/test_failure.py": "times, idle CPU, memory",
    "distributed/rpc/test_many_workers.py": "64 processes",
    "distributed/rpc/test_references_many.py": "counts what is in /dev/shm",
    "distributed/rpc/test_life.py::test_nothing_is_left_in_shared_memory": "looks at /dev/shm",
    "distributed/test_by_role.py::test_roles_on_two_hosts_meet_by_secret_and_tls": "a lab",
    "distributed/test_launch.py::test_all_end_together_and_leave_nothing_behind": "looks at /dev/shm and at all ports",
    "distributed/test_bench_distributed.py": "a lab, and times on its links",
    "distributed/test_bench_lookahead.py": "a lab",
    "distributed/test_lab.py": "looks at all labs of this machine, and times on their links",
    "unit/benchmarks/test_bench_reporting.py::test_foreign_load_tells_workers_from_others": "the machine's load",
    "unit/rpc/test_reactor.py": "times of milliseconds, idle CPU",
    "unit/rpc/test_stream.py": "times of tenths of a second",
}
"""Tests that are about the machine or about short times, and why: `make test` runs them one at a time, without others."""
sys.path[:0] = [str(HERE), str(HERE / "conformance")]

from world import Worlds  # noqa: E402

from forked import context  # noqa: E402


def pytest_collection_modifyitems(items):
    for item in items:
        module = item.path.relative_to(HERE).as_posix()
        if module in ALONE or f"{module}::{item.originalname}" in ALONE:
            item.add_marker("alone")


def pytest_collection_finish(session):
    """Wait for what :mod:`warm` compiles where nothing is cached: half a minute, which no test's limit on time allows for."""
    gc.freeze()  # libraries and tests stay until the end: the collector took a tenth of the suite's time to look at them
    if "PYTEST_XDIST_WORKER" in os.environ and os.environ.get("NUMBA_DISABLE_JIT") != "1":
        first = context().Process(target=os.getpid)
        first.start()
        first.join()


@pytest.fixture(scope="session")
def worlds():
    """``worlds(size)`` gives joined processes of that number, which all tests share; see :class:`world.Worlds`."""
    made = Worlds()
    yield made
    made.close()


@pytest.fixture(scope="session")
def server_crew():
    """Three embedding servers, which all tests share; see :class:`role_crew.RoleCrew`."""
    from role_crew import RoleCrew

    from pibroch.servers import serve

    made = RoleCrew(3, serve)
    yield made
    made.close()


@pytest.fixture(scope="session")
def oracle_crew(server_crew):
    """A central oracle, which meets with the servers."""
    from role_crew import RoleCrew

    from pibroch.servers import serve_plans

    made = RoleCrew(1, serve_plans, server_crew.meet)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def two_threads():
    """Each test starts with the same number of threads, whatever the one before it set."""
    torch.set_num_threads(2)
