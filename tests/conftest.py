import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "conformance"))
pytest_plugins = ["world"]  # the fixture `worlds`: all tests share its processes


@pytest.fixture(autouse=True)
def two_threads():
    """Each test starts with the same number of threads, whatever the one before it set."""
    torch.set_num_threads(2)
