from pathlib import Path

import pytest


@pytest.fixture(scope="package")
def data(tmp_path_factory):
    from small_run import make_dataset

    return make_dataset(tmp_path_factory.mktemp("data") / "small")


@pytest.fixture(scope="package")
def expected(worlds, data, tmp_path_factory):
    """A run of two ranks with `alltoall`, the settings of :mod:`test_lookahead_train`."""
    import training_cases as cases
    from test_lookahead_train import COMMON

    from small_run import make_config

    folder = tmp_path_factory.mktemp("expected") / "run"
    worlds(2).run(
        cases.train,
        make_config(data, *COMMON, "embedding.exchange=alltoall").model_dump(),
        str(folder),
    )
    return folder


def pytest_collection_modifyitems(items):
    """Many processes on a loaded machine take their time.

    Waits inside the tests have their own, shorter limits.
    """
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(900))
