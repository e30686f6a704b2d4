import pytest


@pytest.fixture(scope="package")
def data(tmp_path_factory):
    from small_run import make_dataset

    return make_dataset(tmp_path_factory.mktemp("data") / "small")


@pytest.fixture
def shuffled_rows(monkeypatch):
    """All indices that are made of the kind ``shuffled_rows:Shuffled``."""
    from shuffled_rows import Shuffled, ShuffledIndex

    made = []

    def index(kind, capacity):
        made.append(ShuffledIndex(capacity))
        return made[-1]

    monkeypatch.setattr(Shuffled, "index", index)
    return made
