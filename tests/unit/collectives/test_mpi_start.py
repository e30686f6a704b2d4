"""MPI starts under ``mpiexec`` alone."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

ALONE = """
from pibroch.collectives.bounded_lag.mpi_start import start_mpi
from pibroch.errors import ConfigError
try:
    start_mpi(0, 2)
except ConfigError as error:
    print(error)
"""


@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_without_mpiexec_it_is_named():
    ended = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60, check=True
    )
    assert "do: mpiexec -n 2 python" in ended.stdout
