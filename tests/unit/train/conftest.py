from dataclasses import replace

import pytest


@pytest.fixture(scope="package")
def data(tmp_path_factory):
    from small_run import make_dataset

    return make_dataset(tmp_path_factory.mktemp("data") / "small")


@pytest.fixture
def shuffled_rows(monkeypatch):
    """Gives the tables of runs indices with a state, which recipes do not name yet.

    Returns all that are made.
    """
    from pibroch.train import session
    from shuffled_rows import Shuffled, ShuffledIndex

    tables = session.build_tables
    monkeypatch.setattr(
        session,
        "build_tables",
        lambda *args: [replace(table, rows=Shuffled()) for table in tables(*args)],
    )
    made = []

    def index(kind, capacity):
        made.append(ShuffledIndex(capacity))
        return made[-1]

    monkeypatch.setattr(Shuffled, "index", index)
    return made
