import pytest


@pytest.fixture(scope="package")
def data(tmp_path_factory):
    from small_run import make_dataset

    return make_dataset(tmp_path_factory.mktemp("data") / "small")
