import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "conformance")]

from world import Worlds  # noqa: E402


@pytest.fixture(scope="session")
def worlds():
    """``worlds(size)`` gives joined processes of that number, which all tests share; see :class:`world.Worlds`."""
    made = Worlds()
    yield made
    made.close()


@pytest.fixture(scope="session")
def server_crew():
    """Three embedding servers, which all tests share; see :class:`server_crew.ServerCrew`."""
    from server_crew import ServerCrew

    made = ServerCrew(3)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def two_threads():
    """Each test starts with the same number of threads, whatever the one before it set."""
    torch.set_num_threads(2)
