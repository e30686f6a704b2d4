import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="package")
def data(tmp_path_factory):
    from small_run import make_dataset

    return make_dataset(tmp_path_factory.mktemp("data") / "small")
