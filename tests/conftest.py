import gc
import os

import pytest

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # torch's threads would spin and take cores from other tests
import torch
from world import Worlds

from forked import context

pytest_plugins = ["retries", "tiers"]


def pytest_collection_finish(session):
    """Wait for what :mod:`warm` compiles where nothing is cached.

    Half a minute, which no test's limit on time allows for.
    """
    # libraries and tests stay until the end: the collector took a tenth of the suite's time to look
    # at them
    gc.freeze()
    if "PYTEST_XDIST_WORKER" in os.environ and os.environ.get("NUMBA_DISABLE_JIT") != "1":
        first = context().Process(target=os.getpid)
        first.start()
        first.join()


@pytest.fixture(scope="session")
def worlds():
    """``worlds(size)`` gives joined processes of that number, which all tests share.

    See :class:`world.Worlds`.
    """
    made = Worlds()
    yield made
    made.close()


@pytest.fixture(scope="session")
def server_team():
    """Three embedding servers, which all tests share; see :class:`role_team.RoleTeam`."""
    from role_team import RoleTeam

    from pibroch.servers import serve

    made = RoleTeam(3, serve)
    yield made
    made.close()


@pytest.fixture(scope="session")
def oracle_team(server_team):
    """A central oracle, which meets with the servers."""
    from role_team import RoleTeam

    from pibroch.servers import serve_plans

    made = RoleTeam(1, serve_plans, server_team.rendezvous)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def two_threads():
    """Each test starts with the same number of threads, whatever the one before it set."""
    torch.set_num_threads(2)
